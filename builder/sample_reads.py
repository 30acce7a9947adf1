"""Which bytes of a shard a sample needs, and where they go in a block of memory.

The one place that turns an index row, the arrays asked for and a crop to ranges; every reader, local or remote, reads
what stands here and nothing else.

Shape legend: T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import xxhash

from ..schemas.errors import DataError, UsageError
from ..schemas.index import IndexRow
from ..schemas.states import INPUT_IDS, LOSS_MASK, state_names
from .tar_header import pad_to

ALIGNMENT = 64
"""Arrays begin at a multiple of it in the shard, and so in a block."""

_DTYPES = {INPUT_IDS: torch.int32, LOSS_MASK: torch.uint8}


class FlippedBitsError(DataError):
    """Bytes that were read are not those that were packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRead:
    """The wanted rows of one array."""

    name: str
    offset: int
    """In the shard."""

    length: int
    T: int
    start: int
    """In the block."""

    xxh3_128: str
    """Empty where the rows are cropped: the index knows the checksum of the whole array alone."""

    is_coded: bool = False
    """Whether its rows are decoded into the block (builder/planes_read.py); no span has them then."""

    def tensor(self, block: torch.Tensor, *, shares_storage: bool) -> torch.Tensor:
        """Return the rows as a view of `block` (uint8): [T] for ids and mask, else [T, H]."""
        dtype = _DTYPES.get(self.name, torch.bfloat16)
        if shares_storage:
            flat = block[self.start : self.start + self.length].view(dtype)
        else:
            count = self.length // dtype.itemsize
            flat = torch.frombuffer(block.numpy().data, dtype=dtype, count=count, offset=self.start)
        return flat if self.name in _DTYPES else flat.view(self.T, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes that are read in one go."""

    offset: int
    """In the shard."""

    length: int
    start: int
    """In the block."""

    def pieces(self, piece_bytes: int) -> Iterator[Span]:
        """Yield the span in pieces of at most `piece_bytes`."""
        for done in range(0, self.length, piece_bytes):
            length = min(piece_bytes, self.length - done)
            yield Span(offset=self.offset + done, length=length, start=self.start + done)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReads:
    """What one sample takes."""

    row: IndexRow
    arrays: tuple[ArrayRead, ...]
    spans: tuple[Span, ...]
    """What is read as it is: all of the arrays but coded ones."""

    block_bytes: int

    @property
    def coded(self) -> tuple[ArrayRead, ...]:
        """The arrays that are decoded."""
        return tuple(array for array in self.arrays if array.is_coded)

    def tensors(self, block: torch.Tensor, *, shares_storage: bool = False) -> dict[str, torch.Tensor]:
        """Return all arrays as views of `block`, in file order.

        With a storage each, `torch.save` of one array saves that array alone. Sharing the block's, a sample crosses a
        process border under one descriptor, and torch knows of pinned memory which copies from it are still under way.
        """
        return {array.name: array.tensor(block, shares_storage=shares_storage) for array in self.arrays}

    def check(self, block: torch.Tensor, where: str) -> None:
        """Hold the whole arrays against the index's checksums; `where` names the shard.

        Raises:
            FlippedBitsError: names the array and the sample.
        """
        for array in self.arrays:
            view = block[array.start : array.start + array.length].numpy().data
            if array.xxh3_128 and xxhash.xxh3_128_hexdigest(view) != array.xxh3_128:
                raise FlippedBitsError(
                    f"{where}: {array.name} of sample {self.row.key} (bytes {array.offset} to "
                    f"{array.offset + array.length}) does not have the checksum of the index",
                    why="The shard was damaged on its way here, or is of another packing",
                    mend="Copy the shard again; `eaglehs verify` names all that is wrong with it",
                )


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


def plan_reads(row: IndexRow, arrays: Sequence[str], max_tokens: int | None, *, gap_bytes: int = 0) -> SampleReads:
    """Return what to read of the sample `row`: the named arrays, at most `max_tokens` rows of each.

    Arrays that lie at most `gap_bytes` apart become one span, and what is between them is read along.
    """
    T = row.num_tokens if max_tokens is None else min(row.num_tokens, max_tokens)
    reads: list[ArrayRead] = []
    spans: list[Span] = []
    end_of_block = 0
    for name in arrays:
        place = row.arrays[name]
        length = place.length // row.num_tokens * T
        last = spans[-1] if spans and not reads[-1].is_coded else None
        if place.coded is not None:
            start = pad_to(end_of_block, ALIGNMENT)
        elif last is not None and 0 <= place.offset - last.offset - last.length <= gap_bytes:
            start = last.start + place.offset - last.offset
            spans[-1] = Span(offset=last.offset, length=place.offset + length - last.offset, start=last.start)
        else:
            start = pad_to(end_of_block, ALIGNMENT)
            spans.append(Span(offset=place.offset, length=length, start=start))
        end_of_block = start + length
        checksum = place.xxh3_128 if row.num_tokens == T else ""
        read = ArrayRead(name=name, offset=place.offset, length=length, T=T, start=start, xxh3_128=checksum)
        reads.append(read if place.coded is None else replace(read, is_coded=True))
    return SampleReads(row=row, arrays=tuple(reads), spans=tuple(spans), block_bytes=end_of_block)
