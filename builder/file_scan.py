"""Reads a file once from begin to end, in blocks that stay in the processor's cache, and tells each listener its part.

`preadv` into one reused buffer: no page of the file is mapped, so memory stays flat whatever the file's size, and no
fresh memory is touched (measured: faster than `mmap` for data that is read once).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.errors import DataError

BLOCK_BYTES = 1024 * 1024
"""Measured on the state checks: 8.4 GB/s a core with 1 MiB, 4.7 with 4 MiB."""


class FileCutError(DataError):
    """A file ends before the bytes that it should have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Part of a file that somebody listens to, in whole rows."""

    offset: int
    length: int
    row_bytes: int
    """Blocks are cut at multiples of this."""

    take: Callable[[memoryview], object]
    """Called with each block in order; the memory is used again afterwards."""


def scan_file(
    path: Path, handle: int, size_bytes: int, regions: Iterable[Region], on_block: Callable[[memoryview], object]
) -> None:
    """Give every byte of the file to `on_block` and each region's bytes to its listener as well, in file order.

    Regions come in file order, do not overlap and lie within the file; they are asked for one by one, as the file is
    read.

    Raises:
        FileCutError: the file ends before `size_bytes`.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for region in _gapless(regions, size_bytes):
        if region.row_bytes > len(buffer):
            buffer = memoryview(bytearray(region.row_bytes))
        step = max(len(buffer) // region.row_bytes, 1) * region.row_bytes
        for start in range(region.offset, region.offset + region.length, step):
            block = buffer[: min(step, region.offset + region.length - start)]
            read_exactly(path, handle, block, start)
            on_block(block)
            region.take(block)


def read_exactly(path: Path, handle: int, block: memoryview, offset: int) -> None:
    """Fill `block` from the open file.

    Raises:
        FileCutError: the file ends first.
    """
    done = 0
    while done < len(block):
        step = os.preadv(handle, [block[done:]], offset + done)
        if step == 0:
            raise FileCutError(f"{path}: ends at {offset + done}, while more bytes were expected", why="It was cut")
        done += step


def read_blocks(
    path: Path, handle: int, offset: int, length: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[memoryview]:
    """Yield `length` bytes of the open file from `offset` on, in blocks; their memory is used again.

    Raises:
        FileCutError: the file ends first.
    """
    buffer = memoryview(bytearray(min(block_bytes, length)))
    for start in range(0, length, block_bytes):
        block = buffer[: min(block_bytes, length - start)]
        read_exactly(path, handle, block, offset + start)
        yield block


def _gapless(regions: Iterable[Region], size_bytes: int) -> Iterator[Region]:
    offset = 0
    for region in regions:
        assert offset <= region.offset <= size_bytes - region.length, (
            f"{region} after {offset:,} of {counted(size_bytes, 'byte')}"
        )
        if region.offset > offset:
            yield _unheard(offset, region.offset)
        yield region
        offset = region.offset + region.length
    if offset < size_bytes:
        yield _unheard(offset, size_bytes)


def _unheard(start: int, end: int) -> Region:
    return Region(offset=start, length=end - start, row_bytes=1, take=lambda _: None)
