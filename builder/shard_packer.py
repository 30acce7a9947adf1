"""Makes one shard of a run: checks each sample's dumps, writes it to its place, reads the file back, renames it.

A refused sample is set aside with its reason, and the shard is laid out anew without it. Each dump is read once for
its checks and copied once in the kernel; the finished file is read once for its SHA-256 and, in the same pass, for
the hash of each array: what is in the shard is what was checked.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from ..schemas.atomic import staged
from ..schemas.errors import DataError, StorageError
from ..schemas.index import ArrayPlace, IndexRow
from ..schemas.ledger import LedgerEntry
from ..schemas.manifest import DatasetFolder, ShardEntry
from ..schemas.progress import Progress
from ..schemas.prompt import Prompt
from ..schemas.sample import SampleMeta, meta_content
from ..schemas.sizes import format_size
from ..schemas.states import INPUT_IDS, LOSS_MASK
from .assemble import ExaminedSample, ForeignDumpError, RowCoverageError, SampleError, examine
from .file_scan import Region, scan_file
from .pack_state import PackedShard, SetAside
from .plan import META, PlacedSample, ShardPlan
from .run_reader import Run
from .tar_writer import FileRange, Piece, ShardWriter


class DumpChangedError(SampleError):
    """A dump is not the file that the ledger lists."""


class ShardReadBackError(StorageError):
    """A shard's bytes are not those that were written to it."""


class PackStoppedError(Exception):
    """Another worker's error ends the pack; this shard is given up."""


class _SetAsideError(Exception):
    """Samples were refused while the shard was written; it is laid out anew without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """A finished shard and its rows of the index."""

    record: PackedShard
    rows: tuple[IndexRow, ...]


class ShardPacker:
    """Packs one shard; used once, by one thread."""

    def __init__(self, run: Run, folder: DatasetFolder, progress: Progress, stop: threading.Event) -> None:
        """`stop` ends the work at the next sample."""
        self._run = run
        self._folder = folder
        self._progress = progress
        self._stop = stop
        self._examined: dict[str, ExaminedSample] = {}
        self._set_aside: dict[str, SetAside] = {}

    def pack(self, shard: ShardPlan, fingerprint: str) -> ShardResult:
        """Write the shard with all of its samples that are good; no file if none is.

        Raises:
            StorageError: the disk is full or failed; no file has the shard's name.
        """
        path = self._folder.shard(shard.name)
        try:
            while True:
                kept = shard.without(self._set_aside)
                if not kept.samples:
                    path.unlink(missing_ok=True)
                    return self._result(kept, fingerprint, (), "")
                try:
                    metas, sha256 = self._write(kept, path)
                except _SetAsideError:
                    continue
                return self._result(kept, fingerprint, metas, sha256)
        except OSError as fault:
            raise StorageError(
                f"{path} can't be written: {fault.strerror or fault}",
                mend="Free space or repair the disk, and run the same command again: finished shards are kept",
            ) from None

    def _write(self, shard: ShardPlan, path: Path) -> tuple[list[SampleMeta], str]:
        metas = []
        num_refused = len(self._set_aside)
        with staged(path) as out:
            writer = ShardWriter(out, shard)
            for placed in shard.samples:
                if self._stop.is_set():
                    raise PackStoppedError
                prompt = self._run.prompts.prompt(placed.key)
                examined = self._examine(prompt)
                if examined is None or len(self._set_aside) > num_refused:
                    continue  # the others are still examined, so that the shard is laid out anew once
                metas.append(self._meta(placed, examined))
                self._write_sample(writer, placed, metas[-1], prompt, examined)
            if len(self._set_aside) > num_refused:
                raise _SetAsideError
            sha256 = read_back(out, path, shard, metas)
        for placed in shard.samples:
            self._progress.advance(
                num_samples=1, num_tokens=placed.sample.num_tokens, size_bytes=placed.end - placed.start
            )
        return metas, sha256

    def _examine(self, prompt: Prompt) -> ExaminedSample | None:
        if prompt.key in self._examined:
            return self._examined[prompt.key]
        try:
            entry = self._run.entries[prompt.key]
            examined = examine(prompt, self._run.dump_paths(prompt.key), self._run.layout)
            _check_ledger(entry, examined, self._run.record.run_id)
        except DataError as fault:
            self._set_aside[prompt.key] = SetAside(key=prompt.key, id=prompt.id, reason=str(fault))
            self._progress.note(f"sample {prompt.key} is set aside: {fault}")
            return None
        self._examined[prompt.key] = examined
        return examined

    def _meta(self, placed: PlacedSample, examined: ExaminedSample) -> SampleMeta:
        return SampleMeta(
            key=placed.key,
            id=placed.sample.id,
            source=placed.sample.source,
            num_tokens=placed.sample.num_tokens,
            num_trainable=self._run.prompts.num_trainable_of(placed.key),
            next_token=self._run.entries[placed.key].next_token,
            xxh3_128=examined.xxh3_128,
        )

    def _write_sample(
        self, writer: ShardWriter, placed: PlacedSample, meta: SampleMeta, prompt: Prompt, examined: ExaminedSample
    ) -> None:
        with ExitStack() as files:
            handles = [files.enter_context(dump.path.open("rb")).fileno() for dump in examined.dumps]
            arrays: dict[str, Sequence[Piece]] = {
                INPUT_IDS: [np.ascontiguousarray(prompt.input_ids, dtype="<i4").tobytes()],
                LOSS_MASK: [np.ascontiguousarray(prompt.loss_mask, dtype="|u1").tobytes()],
            }
            for spec in placed.layout.specs:
                if spec.is_state:
                    arrays[spec.name] = [
                        FileRange(
                            path=dump.path,
                            handle=handle,
                            offset=dump.arrays[spec.name].offset,
                            length=dump.arrays[spec.name].length,
                        )
                        for dump, handle in zip(examined.dumps, handles, strict=True)
                    ]
            writer.write_sample(placed, meta_content(meta, placed.layout.layers), arrays)

    def _result(self, shard: ShardPlan, fingerprint: str, metas: Sequence[SampleMeta], sha256: str) -> ShardResult:
        entry = ShardEntry(
            name=shard.name,
            num_samples=len(shard.samples),
            num_tokens=shard.num_tokens,
            size_bytes=shard.size_bytes,
            sha256=sha256,
        )
        samples = [self._examined[placed.key] for placed in shard.samples]
        record = PackedShard(
            fingerprint=fingerprint,
            entry=entry if shard.samples else None,
            num_trainable=sum(meta.num_trainable for meta in metas),
            norm_sums=_norm_sums(samples),
            set_aside=tuple(self._set_aside[key] for key in sorted(self._set_aside)),
            warnings=tuple(warning for sample in samples for warning in _bloated(sample)),
        )
        rows = tuple(index_row(placed, meta, shard.name) for placed, meta in zip(shard.samples, metas, strict=True))
        return ShardResult(record=record, rows=rows)


def index_row(placed: PlacedSample, meta: SampleMeta, shard: str) -> IndexRow:
    """Return the index row of a sample at its place."""
    return IndexRow(
        shard=shard,
        key=meta.key,
        id=meta.id,
        source=meta.source,
        num_tokens=meta.num_tokens,
        num_trainable=meta.num_trainable,
        next_token=meta.next_token,
        arrays={
            member.array: ArrayPlace(
                offset=member.data_offset, length=member.data_bytes, xxh3_128=meta.xxh3_128[member.array]
            )
            for member in placed.members
            if member.array != META
        },
    )


def read_back(out: BinaryIO, path: Path, shard: ShardPlan, metas: Sequence[SampleMeta]) -> str:
    """Read a written shard once; return its SHA-256 if each array has the hash that its `meta.json` says.

    Raises:
        ShardReadBackError: an array differs.
    """
    whole = hashlib.sha256()
    found: dict[tuple[str, str], xxhash.xxh3_128] = {}
    regions = []
    for placed in shard.samples:
        for member in placed.members:
            if member.array != META:
                digest = found[placed.key, member.array] = xxhash.xxh3_128()
                regions.append(
                    Region(offset=member.data_offset, length=member.data_bytes, row_bytes=1, take=digest.update)
                )
    scan_file(path, out.fileno(), os.fstat(out.fileno()).st_size, regions, whole.update)
    for meta in metas:
        for array, wanted in meta.xxh3_128.items():
            if found[meta.key, array].hexdigest() != wanted:
                raise ShardReadBackError(
                    f"{path}: {meta.key} {array} reads back other bytes than were checked",
                    why="A dump was changed while it was packed, or the disk is failing",
                    mend="Stop what writes to the run's folder, and run the same command again",
                )
    return whole.hexdigest()


def _check_ledger(entry: LedgerEntry, examined: ExaminedSample, run_id: str) -> None:
    for dump in examined.dumps:
        if dump.request.run != run_id:
            raise ForeignDumpError(entry.key, f"{dump.path} is of run {dump.request.run}, this is run {run_id}")
    if entry.num_tokens != examined.checked.num_tokens:
        raise RowCoverageError(
            entry.key, f"the ledger says {entry.num_tokens} tokens, the prompt has {examined.checked.num_tokens}"
        )
    listed = {dump.name: dump for dump in entry.dumps}
    for found, dump in zip(examined.checked.dumps, examined.dumps, strict=True):
        wanted = listed[found.name]
        if found != wanted:
            raise DumpChangedError(
                entry.key,
                f"{dump.path} has {found.size_bytes} bytes and hash {found.xxh3_128}, "
                f"the ledger lists {wanted.size_bytes} bytes and {wanted.xxh3_128}",
                why="The file was changed or damaged after it was checked",
                mend="Remove it and run `eaglehs extract` again: the sample is computed anew",
            )


def _norm_sums(samples: Sequence[ExaminedSample]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for sample in samples:
        for state, norm in sample.checked.state_norms.items():
            sums[state] = sums.get(state, 0.0) + norm * sample.checked.num_tokens
    return sums


def _bloated(sample: ExaminedSample) -> Sequence[str]:
    return [
        f"{dump.path} has {format_size(dump.size_bytes)} for {format_size(dump.content_bytes)} of arrays: "
        "whoever wrote it saved views of larger tensors"
        for dump in sample.dumps
        if dump.is_bloated
    ]
