"""One sample of a local shard as tensors: in place, or copied into one block of memory of its own.

    map_sample     views of the mapped file: nothing is read before it is touched, nothing but pages is kept in memory
    read_sample    one block that holds the wanted rows alone: for what leaves the process
    load_sample    the one or, in a DataLoader worker, the other

Both touch only the arrays that are asked for, and of these only the rows that are wanted.

Shape legend: T tokens, H hidden width.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.utils.data import get_worker_info

from ..schemas.errors import StorageError
from ..schemas.index import IndexRow
from ..schemas.sizes import format_size
from .file_map import check_holds, map_range, open_to_read
from .sample_reads import Span, plan_reads

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

    Raises:
        ShardCutError: the shard ends before the arrays do.
        StorageError: it can't be opened or mapped.
    """
    reads = plan_reads(row, arrays, max_tokens, gap_bytes=row.arrays[arrays[-1]].offset)
    (span,) = reads.spans
    memory, shift = map_range(path, span.offset, span.length)
    return reads.tensors(torch.frombuffer(memory, dtype=torch.uint8, count=span.length, offset=shift))


def read_sample(
    path: Path, row: IndexRow, arrays: Sequence[str], *, max_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """Return what `map_sample` does, as views of one new block of memory: one descriptor across a process border.

    Raises:
        ShardCutError: the shard ends before the arrays do.
        StorageError: it can't be opened.
    """
    reads = plan_reads(row, arrays, max_tokens)
    block = torch.empty(reads.block_bytes, dtype=torch.uint8)
    read_block(path, reads.spans, block)
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
            check_holds(handle, path, span.offset + span.length)
            _read_into(handle, block[span.start : span.start + span.length], span.offset)
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


def _read_into(handle: int, target: torch.Tensor, offset: int) -> None:
    view = target.numpy().data
    while view:
        done = os.preadv(handle, [view], offset)
        assert done, "the file was longer a moment ago"
        view, offset = view[done:], offset + done
