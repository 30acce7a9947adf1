"""Coded state: the member `<key>.<state>.bf16.planes` of a dataset with codec `planes-zstd`. Format version 1.

A head and the blocks after it, all numbers little-endian:

    0    8 bytes   `EHPLANES`
    8    uint32    version, 1
    12   uint32    H, the width
    16   uint64    T, the rows
    24   uint32    R, the rows of a block; the last one has what is left
    28   uint32    B, the blocks: T / R, rounded up
    32   B times   uint32 bytes of the block in the file, uint32 lower half of the XXH3-64 of these bytes
    ...  the blocks one after another, nothing between or after them

A block of n rows has 2 * n * H bytes of bfloat16, seen as n * H numbers of 16 bits. Under one zstd frame, whose header
gives its content's size, stand first the high bytes of all numbers (sign and 7 bits of the exponent), then the low
ones: alike bytes lie together, and only so does zstd find them. A block that has 2 * n * H bytes in the file holds the
numbers themselves, since zstd would not have made them smaller.

Blocks are of about 2 MiB: they are made and read side by side, and who wants the first rows reads no others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .counts import counted
from .errors import DataError
from .states import MAX_MEMBER_BYTES

MAGIC = b"EHPLANES"
FIXED = struct.Struct("<8sIIQII")
"""The head up to its table."""

_ENTRY = struct.Struct("<II")
_VERSION = 1
_VALUE_BYTES = 2
_MAX_BLOCKS = MAX_MEMBER_BYTES // _ENTRY.size


class PlanesHeadError(DataError):
    """The head of a coded state is cut or damaged, or not of the rows that it should be of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanesBlock:
    """One block: where it lies in the member, and which rows it holds."""

    number: int
    offset: int
    """From the member's first byte."""

    length: int
    checksum: int
    start: int
    """Its first row."""

    end: int
    """The row after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanesHead:
    """What stands before the blocks."""

    num_rows: int
    width: int
    block_rows: int
    blocks: tuple[tuple[int, int], ...]
    """(bytes, checksum) of each."""

    @property
    def head_bytes(self) -> int:
        """Where the first block begins."""
        return head_bytes(len(self.blocks))

    @property
    def member_bytes(self) -> int:
        """Size of the whole member."""
        return self.head_bytes + sum(length for length, _ in self.blocks)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of bfloat16."""
        return _VALUE_BYTES * self.width

    def placed(self, start: int = 0, end: int | None = None) -> Iterator[PlanesBlock]:
        """Yield the blocks that hold any of the rows from `start` to before `end`."""
        last = self.num_rows if end is None else min(end, self.num_rows)
        offset = self.head_bytes
        for number, (length, checksum) in enumerate(self.blocks):
            first = number * self.block_rows
            block = PlanesBlock(
                number=number,
                offset=offset,
                length=length,
                checksum=checksum,
                start=first,
                end=min(first + self.block_rows, self.num_rows),
            )
            if start < block.end and block.start < last:
                yield block
            offset += length


def head_bytes(num_blocks: int) -> int:
    """Return the size of a head."""
    return FIXED.size + num_blocks * _ENTRY.size


def write_head(head: PlanesHead) -> bytes:
    """Return the bytes of a head."""
    fixed = FIXED.pack(MAGIC, _VERSION, head.width, head.num_rows, head.block_rows, len(head.blocks))
    return fixed + b"".join(_ENTRY.pack(length, checksum) for length, checksum in head.blocks)


def size_of_head(fixed: bytes, *, where: str) -> int:
    """Return the size of the head that begins with `fixed`, its first 32 bytes.

    Raises:
        PlanesHeadError: no such head.
    """
    return head_bytes(_fixed_fields(fixed, where)[3])


def read_head(content: bytes, *, where: str) -> PlanesHead:
    """Read a whole head; `where` names file, sample and array in errors.

    Raises:
        PlanesHeadError: cut, damaged, or of a later version.
    """
    width, num_rows, block_rows, num_blocks = _fixed_fields(content, where)
    table = content[FIXED.size : head_bytes(num_blocks)]
    if len(table) < num_blocks * _ENTRY.size:
        raise PlanesHeadError(
            f"{where}: {counted(len(content), 'byte')} of a head of {head_bytes(num_blocks):,} are there",
            why="It was cut",
        )
    head = PlanesHead(num_rows=num_rows, width=width, block_rows=block_rows, blocks=tuple(_ENTRY.iter_unpack(table)))
    for block in head.placed():
        most = (block.end - block.start) * head.row_bytes
        if not 0 < block.length <= most:
            raise PlanesHeadError(
                f"{where}: block {block.number} of {counted(most, 'byte')} has {block.length:,} by the head's table"
            )
    return head


def _fixed_fields(content: bytes, where: str) -> tuple[int, int, int, int]:
    if len(content) < FIXED.size or content[: len(MAGIC)] != MAGIC:
        raise PlanesHeadError(f"{where}: no coded state, but {content[:8]!r}")
    _, version, width, num_rows, block_rows, num_blocks = FIXED.unpack_from(content)
    if version != _VERSION:
        raise PlanesHeadError(
            f"{where}: a coded state of version {version}; this eaglehs reads version {_VERSION}",
            mend="A newer eaglehs wrote it, or it was damaged: pip install -U eaglehs, or copy the shard again",
        )
    size = num_rows * width * _VALUE_BYTES
    is_sound = 0 < size <= MAX_MEMBER_BYTES and block_rows > 0 and num_blocks == -(-num_rows // block_rows)
    if not is_sound or num_blocks > _MAX_BLOCKS:
        raise PlanesHeadError(
            f"{where}: its head says {counted(num_rows, 'row')} of width {width} in "
            f"{counted(num_blocks, 'block')} of {block_rows:,}",
            why="It was damaged",
        )
    return width, num_rows, block_rows, num_blocks
