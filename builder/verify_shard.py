"""Everything that can be checked of one shard from the files alone, in one pass over its bytes.

    structure     builder/tar_reader: whole samples, in order, nothing else
    index         each row against what the file says
    bytes         SHA-256 of the file, hash of each array; coded states are decoded for it, a block at a time
    values        ids in the vocabulary, mask 0 or 1, states by builder/state_check

A shard whose structure is broken is still read where the index says that its arrays lie.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ..schemas.counts import counted
from ..schemas.index import ArrayPlace, IndexRow
from ..schemas.manifest import Manifest, ShardEntry
from ..schemas.progress import Progress
from ..schemas.states import INPUT_IDS, LOSS_MASK, ArraySpec
from .faults import Findings
from .file_scan import Region, scan_file
from .plan import DatasetLayout
from .planes_read import PlanesFeed
from .state_check import StateCheck
from .tar_reader import OpenShard, read_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to verify, with what manifest and index say of it."""

    entry: ShardEntry
    rows: tuple[IndexRow, ...] | None
    """In file order; None where the index can't be read."""


class ShardVerifier:
    """Verifies one shard; used once, by one thread."""

    def __init__(self, root: Path, manifest: Manifest, task: ShardTask) -> None:
        """`root` is the dataset's folder."""
        self.findings = Findings(root)
        self._path = root / task.entry.name
        self._name = task.entry.name
        self._task = task
        self._vocab_size = manifest.model.vocab_size
        self._layout = DatasetLayout(
            layers=manifest.layers, hidden_size=manifest.model.hidden_size, codec=manifest.codec
        )

    def verify(self, progress: Progress, *, quick: bool = False) -> Findings:
        """Return all that is wrong with the shard; `quick` leaves its arrays and its SHA-256 unread."""
        with self.findings.noting(self._name), self._path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            self.findings.num_files, self.findings.size_bytes = 1, size_bytes
            if size_bytes != self._task.entry.size_bytes:
                self._add(f"has {counted(size_bytes, 'byte')}, manifest.json says {self._task.entry.size_bytes:,}")
            shard = OpenShard(path=self._path, handle=file.fileno(), size_bytes=size_bytes)
            rows = self._structure(shard)
            self._count(rows)
            if not quick:
                self._read(shard, rows, progress)
        return self.findings

    def _structure(self, shard: OpenShard) -> Sequence[IndexRow]:
        """Return the samples as the file has them; as the index has them, if the file's structure is broken."""
        rows: list[IndexRow] = []
        num_before = len(self.findings.faults)
        with self.findings.noting(self._name):
            rows.extend(read_samples(shard, self._name, self._layout))
        listed = self._task.rows
        if len(self.findings.faults) > num_before:
            return list(_readable(listed if listed is not None else rows, self._layout, shard.size_bytes))
        if listed is not None:
            self._compare(rows, listed)
        return rows

    def _compare(self, found: Sequence[IndexRow], listed: Sequence[IndexRow]) -> None:
        by_key = {row.key: row for row in found}
        for row in listed:
            if row.key not in by_key:
                self._add("is in the index, not in the shard", key=row.key)
            elif by_key[row.key] != row:
                self._add(f"index and shard differ: {_difference(row, by_key[row.key])}", key=row.key)
        for key in by_key.keys() - {row.key for row in listed}:
            self._add("is in the shard, not in the index", key=key)
        order = [row.key for row in listed if row.key in by_key]
        if len(order) == len(found) and order != list(by_key):
            self._add("the index lists the samples in another order than the shard has them")

    def _count(self, rows: Sequence[IndexRow]) -> None:
        entry = self._task.entry
        self.findings.num_samples = len(rows)
        self.findings.num_tokens = sum(row.num_tokens for row in rows)
        found = (self.findings.num_samples, self.findings.num_tokens)
        if found != (entry.num_samples, entry.num_tokens):
            self._add(
                f"has {counted(found[0], 'sample')} of {counted(found[1], 'token')}, "
                f"manifest.json says {entry.num_samples:,} of {entry.num_tokens:,}"
            )

    def _read(self, shard: OpenShard, rows: Sequence[IndexRow], progress: Progress) -> None:
        whole = hashlib.sha256()
        scan_file(shard.path, shard.handle, shard.size_bytes, self._regions(shard, rows, progress), whole.update)
        if whole.hexdigest() != self._task.entry.sha256:
            self._add(f"SHA-256 is {whole.hexdigest()}, manifest.json says {self._task.entry.sha256}")

    def _regions(self, shard: OpenShard, rows: Sequence[IndexRow], progress: Progress) -> Iterator[Region]:
        for row in rows:
            yield from SampleVerifier(self.findings, row, self._layout, self._vocab_size).regions(shard)
            progress.advance(num_samples=1, num_tokens=row.num_tokens, size_bytes=row.array_bytes)

    def _add(self, message: str, *, key: str = "") -> None:
        self.findings.add(self._name, message, key=key)


class SampleVerifier:
    """Verifies the arrays of one sample as they are read."""

    def __init__(self, findings: Findings, row: IndexRow, layout: DatasetLayout, vocab_size: int) -> None:
        """`row` says where the arrays lie."""
        self._findings = findings
        self._row = row
        self._layout = layout
        self._vocab_size = vocab_size
        self._seen: dict[str, str] = {}

    def regions(self, shard: OpenShard) -> Iterator[Region]:
        """Yield each array's place; when the next is asked for, the one before has been read and is judged."""
        place = self._row.arrays[INPUT_IDS]
        ids_T = np.frombuffer(shard.read(place.offset, place.length), dtype="<i4")
        mask_T = np.frombuffer(shard.read(self._row.arrays[LOSS_MASK].offset, len(ids_T)), dtype="|u1")
        self._check_ids(ids_T)
        self._check_mask(mask_T)
        for spec in self._layout.specs:
            place = self._row.arrays[spec.name]
            if spec.is_state:
                yield from self._state(spec, place, ids_T)
            else:
                digest = xxhash.xxh3_128()
                yield Region(offset=place.offset, length=place.length, row_bytes=spec.row_bytes, take=digest.update)
                self._check_hash(spec.name, digest.hexdigest())

    def _state(self, spec: ArraySpec, place: ArrayPlace, ids_T: npt.NDArray[np.int32]) -> Iterator[Region]:
        check = StateCheck(spec.name, ids_T)
        if place.coded is None:

            def take(block: memoryview) -> None:
                check.update(np.frombuffer(block, dtype="<u2").reshape(-1, spec.width))

            yield Region(offset=place.offset, length=place.length, row_bytes=spec.row_bytes, take=take)
        else:
            feed = PlanesFeed(self._row, spec.name, check.update, where=spec.name)
            yield Region(offset=place.offset, length=place.stored_bytes, row_bytes=1, take=feed.update)
            damage = feed.end()
            if damage is not None:  # what could be decoded of it says nothing more
                self._add(damage.what.removeprefix(f"{spec.name}: "), array=spec.name)
                return
        for fault in check.faults():
            self._add(fault.message, array=spec.name, row=fault.row)
        if check.xxh3_128 in self._seen:
            self._add(f"is identical with {self._seen[check.xxh3_128]}", array=spec.name)
        self._seen[check.xxh3_128] = spec.name
        self._check_hash(spec.name, check.xxh3_128)

    def _check_hash(self, array: str, found: str) -> None:
        wanted = self._row.arrays[array].xxh3_128
        if found != wanted:
            self._add(f"its bytes have hash {found}, meta.json and index say {wanted}", array=array)

    def _check_ids(self, ids_T: npt.NDArray[np.int32]) -> None:
        bad = np.flatnonzero((ids_T < 0) | (ids_T >= self._vocab_size))
        if len(bad):
            row = int(bad[0])
            message = f"token id {ids_T[row]} is outside the vocabulary of {self._vocab_size}"
            self._add(message, array=INPUT_IDS, row=row)

    def _check_mask(self, mask_T: npt.NDArray[np.uint8]) -> None:
        bad = np.flatnonzero(mask_T > 1)
        if len(bad):
            self._add(f"mask value {mask_T[bad[0]]}, expected 0 or 1", array=LOSS_MASK, row=int(bad[0]))
        elif int(mask_T.sum()) != self._row.num_trainable:
            self._add(
                f"{counted(int(mask_T.sum()), 'trainable token')}, {self._row.num_trainable:,} are said",
                array=LOSS_MASK,
            )

    def _add(self, message: str, *, array: str, row: int | None = None) -> None:
        self._findings.add(self._row.shard, message, key=self._row.key, array=array, row=row)


def _readable(rows: Sequence[IndexRow], layout: DatasetLayout, size_bytes: int) -> Iterator[IndexRow]:
    """Yield the rows whose arrays lie within the file, one after another, with the lengths that they should have."""
    end = 0
    for row in rows:
        places: Mapping[str, ArrayPlace] = row.arrays
        is_good = row.num_tokens > 0 and list(places) == [spec.name for spec in layout.specs]
        start = end
        for spec in layout.specs if is_good else ():
            place = places[spec.name]
            is_good = is_good and place.offset >= end and place.length == row.num_tokens * spec.row_bytes
            end = place.offset + place.stored_bytes
        if is_good and end <= size_bytes:
            yield row
        else:
            end = start


def _difference(listed: IndexRow, found: IndexRow) -> str:
    for field in dataclasses.fields(IndexRow):
        one, other = getattr(listed, field.name), getattr(found, field.name)
        if one != other and field.name != "arrays":
            return f"{field.name} is {one!r} in the index, {other!r} in the shard"
    for array in found.arrays:
        if listed.arrays.get(array) != found.arrays[array]:
            return f"{array} is {listed.arrays.get(array)} in the index, {found.arrays[array]} in the shard"
    return f"arrays {list(listed.arrays)} in the index, {list(found.arrays)} in the shard"
