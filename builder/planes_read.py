"""Coded states (schemas/planes.py) to rows, in the three ways in which bytes come.

    CodedState      any rows, from ranges that are read when they are needed: files, servers
    decode_member   a whole member in memory, its blocks side by side: rows of stock readers
    PlanesFeed      a stretch of bytes piece by piece, in order: checks that read a file once

Shape legend: T rows, H hidden width, N rows of a block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ..schemas.counts import counted
from ..schemas.errors import DataError
from ..schemas.index import ArrayPlace, IndexRow
from ..schemas.planes import FIXED, PlanesBlock, PlanesHead, PlanesHeadError, read_head, size_of_head
from .file_scan import read_exactly
from .planes import Rows, decode_rows
from .tar_writer import write_all

ReadInto = Callable[[int, memoryview], None]
"""Fills memory from an offset of the shard; raises what the source raises."""

_FIRST_BYTES = 4096
"""Holds the head of a state of a gigabyte."""

_RUN_BYTES = 8 * 1024 * 1024
"""Coded bytes that are read in one go: neighbouring blocks, one request."""


class CodedState:
    """One coded state of one sample; its methods may be called from any thread."""

    def __init__(self, read_into: ReadInto, row: IndexRow, name: str, *, shard: str) -> None:
        """Read nothing yet; `shard` is what errors call the file."""
        place = row.arrays[name]
        assert place.coded is not None, name
        self._read_into = read_into
        self._place = place
        self._num_rows = row.num_tokens
        self._width = place.coded.width
        self.where = f"{shard}: {name} of sample {row.key}"
        self._head: PlanesHead | None = None
        self._lock = threading.Lock()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, decoded."""
        return 2 * self._width

    def head(self) -> PlanesHead:
        """Return the head, read once.

        Raises:
            PlanesHeadError: it is damaged, or not that of the array that the index has.
        """
        with self._lock:
            if self._head is None:
                self._head = self._read_head()
            return self._head

    def read_rows(self, start: int, end: int, out: memoryview) -> None:
        """Decode the rows from `start` to before `end` into `out`; only the blocks that hold them are read.

        Raises:
            PlanesHeadError, CodedBlockError: the member is damaged; file, sample, array and block are named.
        """
        self._read_part(start, end, out, (0, 1))

    def tasks(self, num_rows: int, out: memoryview) -> Sequence[Callable[[], None]]:
        """Return what has to run, in any thread and order, until `out` holds the first rows; errors as `read_rows`."""
        parts = -(-self._place.stored_bytes // _RUN_BYTES)
        return [partial(self._read_part, 0, num_rows, out, (part, parts)) for part in range(parts)]

    def _read_part(self, start: int, end: int, out: memoryview, part: tuple[int, int]) -> None:
        """Do the share `part`, (number, of how many), of `read_rows`."""
        number, count = part
        rows_NH = np.frombuffer(out, dtype="<u2").reshape(end - start, self._width)
        for run in list(_runs(self.head().placed(start, end)))[number::count]:
            first, last = run[0], run[-1]
            content = _scratch(last.offset + last.length - first.offset)
            self._read_into(self._place.offset + first.offset, content)
            for block in run:
                at = block.offset - first.offset
                self._decode(content[at : at + block.length], block, start, rows_NH)

    def _decode(self, content: memoryview, block: PlanesBlock, start: int, rows_NH: Rows) -> None:
        """Decode the part of a block that `rows_NH`, from row `start` on, has room for."""
        end = start + len(rows_NH)
        if start <= block.start and block.end <= end:
            target = rows_NH[block.start - start : block.end - start]
            decode_rows(content, block.checksum, target, where=block_name(self.where, block))
            return
        whole = np.empty((block.end - block.start, self._width), dtype="<u2")
        decode_rows(content, block.checksum, whole, where=block_name(self.where, block))
        first, last = max(start, block.start), min(end, block.end)
        rows_NH[first - start : last - start] = whole[first - block.start : last - block.start]

    def _read_head(self) -> PlanesHead:
        content = self._first_bytes(_FIRST_BYTES)
        size = size_of_head(content, where=self.where)
        head = read_head(content if size <= len(content) else self._first_bytes(size), where=self.where)
        check_head(head, self._place, self._num_rows, where=self.where)
        return head

    def _first_bytes(self, count: int) -> bytes:
        content = bytearray(min(count, self._place.stored_bytes))
        self._read_into(self._place.offset, memoryview(content))
        return bytes(content)


class CodedRows:
    """All rows of a coded state, to be written somewhere (builder/tar_writer.py Copied)."""

    def __init__(self, state: CodedState, num_rows: int) -> None:
        """Read nothing yet."""
        self._state = state
        self._num_rows = num_rows

    @property
    def length(self) -> int:
        """Bytes, decoded."""
        return self._num_rows * self._state.row_bytes

    def copy_to(self, out: int, offset: int) -> None:
        """Decode the rows to `offset` of the open file `out`, a block at a time; errors as `CodedState.read_rows`."""
        for start, rows in self.blocks():
            write_all(out, rows, offset + start * self._state.row_bytes)

    def blocks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the first row and the bytes of each block, in memory that is used again."""
        step = self._state.head().block_rows
        buffer = memoryview(bytearray(min(step, self._num_rows) * self._state.row_bytes))
        for start in range(0, self._num_rows, step):
            end = min(start + step, self._num_rows)
            rows = buffer[: (end - start) * self._state.row_bytes]
            self._state.read_rows(start, end, rows)
            yield start, rows


def check_head(head: PlanesHead, place: ArrayPlace, num_rows: int, *, where: str) -> None:
    """Hold a head against the index.

    Raises:
        PlanesHeadError: it is that of another array, or of a cut one.
    """
    assert place.coded is not None, where
    found = (head.num_rows, head.width, head.member_bytes)
    wanted = (num_rows, place.coded.width, place.coded.length)
    if found != wanted:
        raise PlanesHeadError(
            f"{where}: {counted(found[0], 'row')} of width {found[1]} in {counted(found[2], 'byte')} by its head, "
            f"{wanted[0]:,} of {wanted[1]} in {wanted[2]:,} by the index",
            why="It was cut or damaged, or the index is of another packing",
        )


def block_name(where: str, block: PlanesBlock) -> str:
    """Return how errors call a block of the array that they call `where`."""
    return f"{where}: block {block.number} (rows {block.start} to {block.end - 1})"


def file_state(path: Path, handle: int, row: IndexRow, name: str) -> CodedState:
    """Return a coded state of a shard that is open for reading, for as long as it is.

    Its methods raise FileCutError as well, where the file ends first.
    """

    def read_into(offset: int, target: memoryview) -> None:
        read_exactly(path, handle, target, offset)

    return CodedState(read_into, row, name, shard=str(path))


def decode_member(content: bytes | bytearray | memoryview, *, where: str, threads: int = 1) -> Rows:
    """Return the rows of a whole member, uint16 [T, H], fresh memory.

    Raises:
        PlanesHeadError, CodedBlockError: it is cut or damaged.
    """
    view = memoryview(content)
    fixed = bytes(view[: FIXED.size])
    head = read_head(bytes(view[: size_of_head(fixed, where=where)]), where=where)
    if head.member_bytes != len(view):
        raise PlanesHeadError(
            f"{where}: {counted(len(view), 'byte')}, {head.member_bytes:,} by its head", why="It was cut"
        )
    rows_TH = np.empty((head.num_rows, head.width), dtype="<u2")

    def decode(block: PlanesBlock) -> None:
        coded = view[block.offset : block.offset + block.length]
        decode_rows(coded, block.checksum, rows_TH[block.start : block.end], where=block_name(where, block))

    run_side_by_side([partial(decode, block) for block in head.placed()], threads)
    return rows_TH


def run_side_by_side(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    """Run all tasks in up to `threads` threads, gone afterwards: a process that is forked later has none of them."""
    if threads < 2 or len(tasks) < 2:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(min(threads, len(tasks)), thread_name_prefix="decode") as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result()


class PlanesFeed:
    """Decodes a member whose bytes are given in order, in pieces of any length; memory is that of a block."""

    def __init__(self, row: IndexRow, name: str, take: Callable[[Rows], object], *, where: str) -> None:
        """`take` is given the rows of each block, uint16 [N, H], in memory that is used again."""
        self._row = row
        self._place = row.arrays[name]
        self._take = take
        self._where = where
        self._waiting = bytearray()
        self._head: PlanesHead | None = None
        self._blocks: Iterator[PlanesBlock] = iter(())
        self._block: PlanesBlock | None = None
        self._rows: Rows = np.empty((0, 0), dtype="<u2")
        self._fault: DataError | None = None

    def update(self, piece: memoryview) -> None:
        """Take the next bytes; what is wrong with them is told at the end, and nothing is taken after it."""
        if self._fault is not None:
            return
        self._waiting += piece
        try:
            self._go_on()
        except DataError as fault:
            self._fault = fault

    def end(self) -> DataError | None:
        """Return what is wrong with the member, all of whose bytes were given; None: every row was taken."""
        if self._fault is None and (self._head is None or self._block is not None):
            return PlanesHeadError(
                f"{self._where}: {counted(self._place.stored_bytes, 'byte is', 'bytes are')} no whole member",
                why="It was cut",
            )
        return self._fault

    def _go_on(self) -> None:
        if self._head is None and not self._has_head():
            return
        while self._block is not None and len(self._waiting) >= self._block.length:
            block, rows_NH = self._block, self._rows[: self._block.end - self._block.start]
            with memoryview(self._waiting)[: block.length] as content:
                decode_rows(content, block.checksum, rows_NH, where=block_name(self._where, block))
            del self._waiting[: block.length]
            self._take(rows_NH)
            self._block = next(self._blocks, None)

    def _has_head(self) -> bool:
        if len(self._waiting) < FIXED.size:
            return False
        size = size_of_head(bytes(self._waiting[: FIXED.size]), where=self._where)
        if len(self._waiting) < min(size, self._place.stored_bytes):
            return False
        self._head = head = read_head(bytes(self._waiting[:size]), where=self._where)
        check_head(head, self._place, self._row.num_tokens, where=self._where)
        del self._waiting[:size]
        self._blocks = head.placed()
        self._block = next(self._blocks, None)
        self._rows = np.empty((min(head.block_rows, head.num_rows), head.width), dtype="<u2")
        return True


_own = threading.local()


def _scratch(size: int) -> memoryview:
    """Return memory of this thread's own, which the next call uses again."""
    memory: bytearray | None = getattr(_own, "memory", None)
    if memory is None or len(memory) < size:
        memory = _own.memory = bytearray(size)
    return memoryview(memory)[:size]


def _runs(blocks: Iterator[PlanesBlock]) -> Iterator[list[PlanesBlock]]:
    """Yield neighbouring blocks that are read in one go."""
    run: list[PlanesBlock] = []
    for block in blocks:
        if run and block.offset + block.length - run[0].offset > _RUN_BYTES:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
