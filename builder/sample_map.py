"""One sample of a local shard as tensors: in place, or copied into one block of memory of its own.

    map_sample     views of the mapped file: nothing is read before it is touched, nothing but pages is kept in memory
    read_sample    one block that holds the wanted rows alone: for what leaves the process, and for what is decoded
    load_sample    the one or, in a DataLoader worker, the other
    SampleRows     any stretch of rows, one after another, in memory that does not grow with the sample

Both touch only the arrays that are asked for, and of these only the rows that are wanted.

Shape legend: T tokens, H hidden width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

import torch
from torch.utils.data import get_worker_info

from ..schemas.errors import StorageError
from ..schemas.index import ArrayPlace, IndexRow
from ..schemas.sizes import format_size
from .file_map import check_holds, map_range, open_to_read, read_range
from .planes_read import file_state, run_side_by_side
from .sample_reads import SampleReads, Span, plan_reads
from .worker_count import decode_threads

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where torch's workers put tensors; nothing is written there by us


def load_sample(
    path: Path, row: IndexRow, arrays: Sequence[str], *, max_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """Return what `map_sample` does; in a DataLoader worker what `read_sample` does, if shared memory has room for it.

    Raises:
        ShardCutError, StorageError: as those do; StorageError too where shared memory is full.
    """
    if get_worker_info() is None:
        return map_sample(path, row, arrays, max_tokens=max_tokens)
    check_shared_memory(plan_reads(row, arrays, max_tokens).block_bytes)
    return read_sample(path, row, arrays, max_tokens=max_tokens)


def map_sample(
    path: Path, row: IndexRow, arrays: Sequence[str], *, max_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the named arrays of the sample `row` of the shard `path`, at most `max_tokens` rows, as views of the file.

    input_ids int32 [T], loss_mask uint8 [T], states bfloat16 [T, H]. They stay valid for as long as they are held;
    writing to them changes neither the file nor what a later call returns. `clone` what is to be saved or sent.
    If one of them is coded, all are in memory of their own, as of `read_sample`.

    Raises:
        ShardCutError: the shard ends before the arrays do.
        CodedBlockError, PlanesHeadError: a coded state is damaged.
        StorageError: it can't be opened or mapped.
    """
    if any(row.arrays[name].coded is not None for name in arrays):
        return read_sample(path, row, arrays, max_tokens=max_tokens)
    reads = plan_reads(row, arrays, max_tokens, gap_bytes=row.arrays[arrays[-1]].offset)
    (span,) = reads.spans
    memory, shift, _ = map_range(path, span.offset, span.length)
    return reads.tensors(torch.frombuffer(memory, dtype=torch.uint8, count=span.length, offset=shift))


def read_sample(
    path: Path, row: IndexRow, arrays: Sequence[str], *, max_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """Return what `map_sample` does, as views of one new block of memory: one descriptor across a process border.

    Raises:
        ShardCutError: the shard ends before the arrays do.
        CodedBlockError, PlanesHeadError: a coded state is damaged.
        StorageError: it can't be opened.
    """
    reads = plan_reads(row, arrays, max_tokens)
    block = torch.empty(reads.block_bytes, dtype=torch.uint8)
    read_block(path, reads.spans, block)
    if reads.coded:
        _decode(path, reads, block)
    return reads.tensors(block, shares_storage=True)


def read_block(path: Path, spans: Iterable[Span], block: torch.Tensor) -> None:
    """Read `spans` of the shard `path` to their places in `block`, uint8.

    Raises:
        ShardCutError: the shard ends before they do.
        StorageError: it can't be opened.
    """
    handle = open_to_read(path)
    try:
        for span in spans:
            read_range(handle, path, span.offset, block[span.start : span.start + span.length].numpy().data)
    finally:
        os.close(handle)


class SampleRows:
    """The rows of one sample, a stretch at a time; use it in a `with`."""

    def __init__(self, path: Path, row: IndexRow, arrays: Sequence[str]) -> None:
        """Map what is plain; errors as `map_sample`."""
        self._handle = open_to_read(path)
        plain = [name for name in arrays if row.arrays[name].coded is None]
        coded = [name for name in arrays if name not in plain]
        try:
            check_holds(self._handle, path, max(_end(row.arrays[name]) for name in arrays))
            self._mapped = map_sample(path, row, plain) if plain else {}
        except BaseException:
            os.close(self._handle)
            raise
        self._coded = {name: file_state(path, self._handle, row, name) for name in coded}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file; stretches that were given out stay."""
        os.close(self._handle)

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return the rows of an array from `start` to before `end`, all of which it has.

        Raises:
            CodedBlockError, PlanesHeadError: the state is coded and damaged.
        """
        if name in self._mapped:
            return self._mapped[name][start:end]
        state = self._coded[name]
        block = torch.empty((end - start) * state.row_bytes, dtype=torch.uint8)
        state.read_rows(start, end, block.numpy().data)
        return block.view(torch.bfloat16).view(end - start, -1)


def _end(place: ArrayPlace) -> int:
    return place.offset + place.stored_bytes


def _decode(path: Path, reads: SampleReads, block: torch.Tensor) -> None:
    """Decode the coded arrays of `reads` to their places in `block`."""
    handle = open_to_read(path)
    try:
        tasks: list[Callable[[], None]] = []
        for array in reads.coded:
            check_holds(handle, path, _end(reads.row.arrays[array.name]))
            target = block[array.start : array.start + array.length].numpy().data
            tasks += file_state(path, handle, reads.row, array.name).tasks(array.T, target)
        run_side_by_side(tasks, decode_threads())
    finally:
        os.close(handle)


def check_shared_memory(needed_bytes: int, folder: Path = _SHARED_MEMORY) -> None:
    """Refuse to hand a sample from a worker to the loop where it does not fit: torch would die of a bus error.

    Raises:
        StorageError: names the room there is and the ways out.
    """
    try:
        stats = os.statvfs(folder)
    except OSError:
        return  # no such folder: torch shares tensors in another way there
    free_bytes = stats.f_bavail * stats.f_frsize
    if free_bytes < needed_bytes:
        needed, free = format_size(needed_bytes), format_size(free_bytes)
        raise StorageError(
            f"a sample of {needed} does not fit into {folder}, which has {free} free",
            why="DataLoader workers hand tensors to the training loop through shared memory",
            mend="Use num_workers=0, which is the fastest way here; or enlarge it: docker run --shm-size=16g",
        )
