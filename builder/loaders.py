"""How a sample's bytes come into memory: three ways behind one face, for builder/prefetch.py to drive.

MappedLoader    views of the local file, its pages made present ahead of the loop: no copy at all
StagedLoader    ranges of any source, read into an arena or into pinned memory; what is coded is decoded there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, Protocol

import torch

from ..schemas.index import IndexRow
from .arena import Arena
from .file_map import map_populate
from .lent_maps import LentMaps
from .planes_read import CodedState
from .sample_map import check_shared_memory
from .sample_reads import SampleReads, Span, plan_reads
from .shard_source import LocalReader, ShardReader

Memory = Literal["arena", "pinned", "shared"]
"""Where staged blocks lie: reused memory; torch's pinned memory; reused memory that is to leave a worker."""

Task = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of each sample."""

    arrays: tuple[str, ...]
    max_tokens: int | None
    verify: bool
    """Whether whole arrays are held against the checksums of the index."""


class Loader(Protocol):
    """Brings samples into memory."""

    shares_storage: bool
    """Whether the arrays of a sample are to share one torch storage."""

    wake: SimpleQueue[None]
    """Gets an item when memory may have come free."""

    def plan(self, row: IndexRow) -> SampleReads:
        """Return what to read of a sample."""
        ...

    def take(self, reads: SampleReads, *, must: bool) -> torch.Tensor | None:
        """Return a block for `reads`; None, unless it `must`, where there is no room now."""
        ...

    def tasks(self, reads: SampleReads, block: torch.Tensor) -> Sequence[Task]:
        """Return what has to run, in any thread and order, until the block holds the sample."""
        ...

    def finish(self, reads: SampleReads, block: torch.Tensor) -> None:
        """Check the block once all tasks are done."""
        ...

    def close(self) -> None:
        """Give up what waits for a next sample; blocks that are held stay valid."""
        ...


class MappedLoader:
    """Views of local shards; other threads make their pages present and unmap them, the loop does neither."""

    shares_storage = False

    def __init__(self, reader: LocalReader, path_of: Callable[[IndexRow], Path], wanted: Wanted) -> None:
        """`path_of` gives the file of a row's shard."""
        self._reader = reader
        self._maps = LentMaps()
        self._path_of = path_of
        self._wanted = wanted
        self.wake: SimpleQueue[None] = SimpleQueue()

    def plan(self, row: IndexRow) -> SampleReads:
        """Return a single span from the first array to the last: what is not touched is not read."""
        last = row.arrays[self._wanted.arrays[-1]].offset
        return plan_reads(row, self._wanted.arrays, self._wanted.max_tokens, gap_bytes=last)

    def take(self, reads: SampleReads, *, must: bool) -> torch.Tensor | None:  # noqa: ARG002 - maps take no room
        """Return the mapped file."""
        self._reader.check_shard(reads.row.shard)
        (span,) = reads.spans
        block = self._maps.take(self._path_of(reads.row), span.offset, span.length)
        self._reader.check_mapped(reads.row.shard)  # after it is mapped: what is exchanged later is not what is seen
        return block

    def tasks(self, reads: SampleReads, block: torch.Tensor) -> Sequence[Task]:
        """Return one task that makes the pages of the wanted rows present."""
        return [partial(self._populate, reads, block)]

    def finish(self, reads: SampleReads, block: torch.Tensor) -> None:
        """Hold whole arrays against the index, if that is asked for."""
        if self._wanted.verify:
            reads.check(block, str(self._path_of(reads.row)))

    def close(self) -> None:
        """End the thread that unmaps."""
        self._maps.close()

    def _populate(self, reads: SampleReads, block: torch.Tensor) -> None:
        path = self._path_of(reads.row)
        for array in reads.arrays:
            map_populate(block.data_ptr() + array.start, array.length, path)


class StagedLoader:
    """Ranges read by `ShardReader.read_into`, several at once where the source is far away."""

    def __init__(self, reader: ShardReader, wanted: Wanted, memory: Memory, arena: Arena | None = None) -> None:
        """`arena` is read into; without one each block is new memory, which torch reuses itself where it is pinned."""
        self._reader = reader
        self._wanted = wanted
        self._memory = memory
        self._arena = arena
        self.wake = SimpleQueue() if arena is None else arena.wake
        self.shares_storage = memory in ("pinned", "shared")

    def plan(self, row: IndexRow) -> SampleReads:
        """Return spans: what lies between two wanted arrays is read along where that is cheaper than a request."""
        return plan_reads(row, self._wanted.arrays, self._wanted.max_tokens, gap_bytes=self._reader.gap_bytes)

    def take(self, reads: SampleReads, *, must: bool) -> torch.Tensor | None:
        """Return a block of the arena, or of its own where the loop itself holds what fills the arena."""
        if self._memory == "shared":
            check_shared_memory(reads.block_bytes)
        if self._arena is not None:
            block = self._arena.take(reads.block_bytes)
            if block is not None or not must:
                return block
        return torch.empty(reads.block_bytes, dtype=torch.uint8, pin_memory=self._memory == "pinned")

    def tasks(self, reads: SampleReads, block: torch.Tensor) -> Sequence[Task]:
        """Return a task a range, those that decode, and one that tells whether the shard is the dataset's, once."""
        shard = reads.row.shard
        pieces = [piece for span in reads.spans for piece in span.pieces(self._reader.range_bytes)]
        tasks: list[Task] = [partial(self._read, shard, piece, block) for piece in pieces]
        for array in reads.coded:
            state = CodedState(
                partial(self._reader.read_into, shard), reads.row, array.name, shard=self._reader.name_of(shard)
            )
            tasks += state.tasks(array.T, block[array.start : array.start + array.length].numpy().data)
        return [partial(self._reader.check_shard, shard), *tasks]

    def finish(self, reads: SampleReads, block: torch.Tensor) -> None:
        """Hold whole arrays against the index, if that is asked for."""
        if self._wanted.verify:
            reads.check(block, self._reader.name_of(reads.row.shard))

    def close(self) -> None:
        """Do nothing: memory comes back by itself."""

    def _read(self, shard: str, piece: Span, block: torch.Tensor) -> None:
        view = block[piece.start : piece.start + piece.length].numpy().data
        self._reader.read_into(shard, piece.offset, view)
