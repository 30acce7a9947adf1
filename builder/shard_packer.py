"""Makes one shard of a run: checks each sample's dumps, appends it, holds what was appended to the checks, renames it.

A refused sample is set aside with its reason, and the shard is laid out anew without it. Each dump is read twice, since
`meta.json` with the hashes comes before the arrays: once for its checks, and once into the memory that is hashed and
written (builder/shard_stream). With a codec the plain shard is a scratch file, and the finished one is made of it
(builder/shard_coder).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from ..schemas.atomic import staged
from ..schemas.errors import DataError, StorageError
from ..schemas.index import IndexRow
from ..schemas.manifest import DatasetFolder, ShardEntry
from ..schemas.progress import Progress
from ..schemas.prompt import Prompt
from ..schemas.sample import SampleMeta
from ..schemas.sizes import format_size
from ..schemas.states import INPUT_IDS, LOSS_MASK, Codec
from .assemble import ExaminedSample
from .dump_reader import Dump
from .dump_zip import DumpUnreadableError
from .index_rows import index_row
from .pack_state import PackedShard, SetAside
from .plan import PlacedSample, ShardPlan
from .run_check import examine_finished
from .run_reader import Run
from .sequential_file import BufferPool, SequentialFile
from .shard_coder import WrittenShard, code_shard, plain_scratch
from .shard_stream import ShardStream
from .side_by_side import StoppedError
from .tar_writer import FileRange, ShardWriter, SourceReadError


class SampleWriter(Protocol):
    """What a sample's arrays are written to."""

    def write_sample(
        self, placed: PlacedSample, meta: SampleMeta, arrays: Mapping[str, Sequence[bytes | FileRange]]
    ) -> None:
        """Write all members of one sample; `arrays` has the pieces of each array by name."""
        ...


class _SetAsideError(Exception):
    """Samples were refused while the shard was written; it is laid out anew without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """A finished shard and its rows of the index."""

    record: PackedShard
    rows: tuple[IndexRow, ...]


@dataclass(slots=True)
class Draft:
    """What is known of a shard's samples so far."""

    metas: list[SampleMeta] = field(default_factory=list)
    norm_sums: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    file: WrittenShard | None = None
    """None where no sample is left, and so no file."""

    def add(self, meta: SampleMeta, state_norms: Mapping[str, float]) -> None:
        """Take up a sample that was written."""
        self.metas.append(meta)
        for state, norm in state_norms.items():
            self.norm_sums[state] = self.norm_sums.get(state, 0.0) + norm * meta.num_tokens

    def result(self, shard: ShardPlan, fingerprint: str, set_aside: Sequence[SetAside] = ()) -> ShardResult:
        """Return the record and the index rows of the shard as it was written: `shard`, all samples of this draft."""
        entry = None
        if self.file is not None:
            entry = ShardEntry(
                name=shard.name,
                num_samples=len(shard.samples),
                num_tokens=shard.num_tokens,
                size_bytes=self.file.size_bytes,
                sha256=self.file.sha256,
            )
        record = PackedShard(
            fingerprint=fingerprint,
            entry=entry,
            num_trainable=sum(meta.num_trainable for meta in self.metas),
            norm_sums=self.norm_sums,
            set_aside=tuple(set_aside),
            warnings=tuple(self.warnings),
        )
        rows = self.file.rows if self.file is not None else ()
        assert len(rows) == len(shard.samples) == len(self.metas), shard.name
        return ShardResult(record=record, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTarget:
    """What all shards of a pack share."""

    folder: DatasetFolder
    codec: Codec
    """Of finished shards."""

    buffers: BufferPool


class ShardPacker:
    """Packs one shard; used once, by one thread."""

    def __init__(self, run: Run, target: PackTarget, progress: Progress, stop: threading.Event) -> None:
        """`stop` ends the work at the next sample."""
        self._run = run
        self._target = target
        self._progress = progress
        self._stop = stop
        self._set_aside: dict[str, SetAside] = {}

    def pack(self, shard: ShardPlan, fingerprint: str) -> ShardResult:
        """Write the shard with all of its samples that are good; no file if none is.

        Raises:
            StorageError: the disk is full or failed; no file has the shard's name.
        """
        path = self._target.folder.shard(shard.name)
        kept, draft = shard, Draft()
        try:
            while kept.samples:
                draft = Draft()
                with suppress(_SetAsideError):
                    self._write(kept, path, draft)
                    break
                kept = shard.without(self._set_aside)
            else:
                path.unlink(missing_ok=True)
        except OSError as fault:
            raise StorageError(
                f"{path} can't be written: {fault.strerror or fault}",
                mend="Free space or repair the disk, and run the same command again: finished shards are kept",
            ) from None
        self._tell(kept)
        return draft.result(kept, fingerprint, [self._set_aside[key] for key in sorted(self._set_aside)])

    def _write(self, shard: ShardPlan, path: Path, draft: Draft) -> None:
        rows: list[IndexRow] = []
        if self._target.codec is not Codec.PLAIN:
            with plain_scratch(path) as plain:
                self._write_samples(ShardWriter(plain, shard), shard, draft, rows.append)
                with staged(path) as out:
                    layout = replace(shard.layout, codec=self._target.codec)
                    draft.file = code_shard(plain, until_stopped(rows, self._stop), out, layout)
            return
        with staged(path) as out, SequentialFile(out, self._target.buffers) as file:
            stream = ShardStream(file, shard)
            self._write_samples(stream, shard, draft, rows.append)
            sha256 = stream.finish()
        draft.file = WrittenShard(rows=tuple(rows), size_bytes=shard.size_bytes, sha256=sha256)

    def _write_samples(
        self, writer: SampleWriter, shard: ShardPlan, draft: Draft, written: Callable[[IndexRow], object]
    ) -> None:
        num_refused = len(self._set_aside)
        for placed in shard.samples:
            if self._stop.is_set():
                raise StoppedError
            prompt = self._run.prompts.prompt(placed.key)
            try:
                examined = examine_finished(self._run, prompt)
                if len(self._set_aside) == num_refused:  # else only look for more: the shard is laid out anew
                    self._add(writer, placed, prompt, examined, draft)
                    written(index_row(placed, draft.metas[-1], shard.name))
            except DataError as fault:
                self._set_aside[prompt.key] = SetAside(key=prompt.key, id=prompt.id, reason=str(fault))
                self._progress.note(f"sample {prompt.key} is set aside: {fault}")
        if len(self._set_aside) > num_refused:
            raise _SetAsideError

    def _add(
        self, writer: SampleWriter, placed: PlacedSample, prompt: Prompt, examined: ExaminedSample, draft: Draft
    ) -> None:
        meta = sample_meta(placed, prompt, examined.checked.xxh3_128, self._run.entries[placed.key].next_token)
        write_sample(writer, placed, meta, prompt, examined.dumps)
        draft.add(meta, examined.checked.state_norms)
        for warning in bloated(examined.dumps):
            draft.warnings.append(warning)
            self._progress.note(f"warning: {warning}")

    def _tell(self, shard: ShardPlan) -> None:
        for placed in shard.samples:
            size_bytes = placed.end - placed.start
            self._progress.advance(num_samples=1, num_tokens=placed.sample.num_tokens, size_bytes=size_bytes)


def until_stopped(rows: Iterable[IndexRow], stop: threading.Event) -> Iterator[IndexRow]:
    """Yield the rows; StoppedError once `stop` is set."""
    for row in rows:
        if stop.is_set():
            raise StoppedError
        yield row


def sample_meta(placed: PlacedSample, prompt: Prompt, xxh3_128: dict[str, str], next_token: int) -> SampleMeta:
    """Return what `meta.json` says of a sample whose arrays have the hashes `xxh3_128`."""
    return SampleMeta(
        key=placed.key,
        id=placed.sample.id,
        source=placed.sample.source,
        num_tokens=placed.sample.num_tokens,
        num_trainable=int(np.sum(prompt.loss_mask)),
        next_token=next_token,
        xxh3_128=xxh3_128,
    )


def write_sample(
    writer: SampleWriter, placed: PlacedSample, meta: SampleMeta, prompt: Prompt, dumps: Sequence[Dump]
) -> None:
    """Write one sample to its place: ids and mask of the prompt, states of its dumps (in row order).

    Raises:
        DumpUnreadableError, SourceCutError, SourceChangedError: a dump changed after it was checked, or can't be read.
        OSError: the shard can't be written.
    """
    with ExitStack() as files:
        handles = [files.enter_context(_open(dump)).fileno() for dump in dumps]
        arrays: dict[str, Sequence[bytes | FileRange]] = {
            INPUT_IDS: [np.ascontiguousarray(prompt.input_ids, dtype="<i4").tobytes()],
            LOSS_MASK: [np.ascontiguousarray(prompt.loss_mask, dtype="|u1").tobytes()],
        }
        for spec in placed.layout.specs:
            if spec.is_state:
                pairs = zip(dumps, handles, strict=True)
                arrays[spec.name] = [_range(dump, handle, spec.name) for dump, handle in pairs]
        try:
            writer.write_sample(placed, meta, arrays)
        except SourceReadError as fault:
            raise DumpUnreadableError(Path(fault.filename), f"can't be read: {fault.strerror}") from None


def _open(dump: Dump) -> BinaryIO:
    try:
        return dump.path.open("rb")
    except OSError as fault:
        raise DumpUnreadableError(dump.path, f"vanished after it was checked: {fault.strerror}") from None


def _range(dump: Dump, handle: int, array: str) -> FileRange:
    place = dump.arrays[array]
    return FileRange(path=dump.path, handle=handle, offset=place.offset, length=place.length)


def bloated(dumps: Iterable[Dump]) -> Sequence[str]:
    """Return a warning for each dump that is much larger than its arrays."""
    return [
        f"{dump.path} has {format_size(dump.size_bytes)} for {format_size(dump.content_bytes)} of arrays: "
        "whoever wrote it saved views of larger tensors"
        for dump in dumps
        if dump.is_bloated
    ]
