"""One sample of a local shard as tensors: in place, or copied into one block of memory of its own.

    map_sample     views of the mapped file: nothing is read before it is touched, nothing but pages is kept in memory
    read_sample    one block that holds the wanted rows alone: for what leaves the process
    load_sample    the one or, in a DataLoader worker, the other

Both touch only the arrays that are asked for, and of these only the rows that are wanted.

Shape legend: T tokens, H hidden width.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import get_worker_info

from ..schemas.errors import StorageError, UsageError
from ..schemas.index import IndexRow
from ..schemas.sizes import format_size
from ..schemas.states import INPUT_IDS, LOSS_MASK, state_names
from .file_map import check_holds, map_range, open_to_read
from .tar_header import pad_to

_DTYPES = {INPUT_IDS: torch.int32, LOSS_MASK: torch.uint8}
_ALIGNMENT = 64
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where torch's workers put tensors; nothing is written there by us


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    """The wanted rows of one array: where they lie in the shard."""

    name: str
    offset: int
    length: int
    T: int

    def tensor(self, memory: memoryview | torch.Tensor, start: int) -> torch.Tensor:
        """Return the rows, which begin at byte `start` of `memory`: [T] for ids and mask, else [T, H]."""
        dtype = _DTYPES.get(self.name, torch.bfloat16)
        if isinstance(memory, torch.Tensor):
            flat = memory[start : start + self.length].view(dtype)
        else:
            flat = torch.frombuffer(memory, dtype=dtype, count=self.length // dtype.itemsize, offset=start)
        return flat if self.name in _DTYPES else flat.view(self.T, -1)


def choose_arrays(states: Sequence[str] | None, layers: Iterable[int]) -> tuple[str, ...]:
    """Return the arrays to read, in file order: ids, mask, and the states asked for; None asks for all.

    Raises:
        UsageError: a state that the dataset does not have.
    """
    known = state_names(layers)
    if isinstance(states, str):
        raise UsageError(f"states is {states!r}", mend=f"Give a list: states=[{states!r}]")
    for name in states or ():
        if name not in known:
            raise UsageError(f"there is no state {name!r} in the dataset; it has {', '.join(known)}")
    return (INPUT_IDS, LOSS_MASK, *(name for name in known if states is None or name in states))


def load_sample(
    path: Path, row: IndexRow, arrays: Sequence[str], *, max_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """Return what `map_sample` does; in a DataLoader worker what `read_sample` does, if shared memory has room for it.

    Raises:
        ShardCutError, StorageError: as those do; StorageError too where shared memory is full.
    """
    if get_worker_info() is None:
        return map_sample(path, row, arrays, max_tokens=max_tokens)
    extents = _extents(row, arrays, max_tokens)
    check_shared_memory(sum(extent.length for extent in extents), _SHARED_MEMORY)
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
    extents = list(_extents(row, arrays, max_tokens))
    begin = min(extent.offset for extent in extents)
    end = max(extent.offset + extent.length for extent in extents)
    memory, shift = map_range(path, begin, end - begin)
    return {extent.name: extent.tensor(memory, extent.offset - begin + shift) for extent in extents}


def read_sample(
    path: Path, row: IndexRow, arrays: Sequence[str], *, max_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """Return what `map_sample` does, as views of one new block of memory: one descriptor across a process border.

    Raises:
        ShardCutError: the shard ends before the arrays do.
        StorageError: it can't be opened.
    """
    extents = list(_extents(row, arrays, max_tokens))
    block = torch.empty(sum(pad_to(extent.length, _ALIGNMENT) for extent in extents), dtype=torch.uint8)
    tensors, start = {}, 0
    handle = open_to_read(path)
    try:
        check_holds(handle, path, max(extent.offset + extent.length for extent in extents))
        for extent in extents:
            _read_into(handle, block[start : start + extent.length], extent.offset)
            tensors[extent.name] = extent.tensor(block, start)
            start += pad_to(extent.length, _ALIGNMENT)
    finally:
        os.close(handle)
    return tensors


def check_shared_memory(needed_bytes: int, folder: Path) -> None:
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


def _extents(row: IndexRow, arrays: Sequence[str], max_tokens: int | None) -> Iterator[_Extent]:
    T = row.num_tokens if max_tokens is None else min(row.num_tokens, max_tokens)
    for name in arrays:
        place = row.arrays[name]
        yield _Extent(name=name, offset=place.offset, length=place.length // row.num_tokens * T, T=T)


def _read_into(handle: int, target: torch.Tensor, offset: int) -> None:
    view = target.numpy().data
    while view:
        done = os.preadv(handle, [view], offset)
        assert done, "the file was longer a moment ago"
        view, offset = view[done:], offset + done
