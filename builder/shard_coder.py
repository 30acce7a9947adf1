"""Recodes a shard that is whole and plain: its states become byte planes under zstd, all else stays as it is.

    code_shard     a plain shard, open, and where its samples lie -> the coded shard, read back
      write_state  one state, block by block, held against its hash as it is read

The plain shard is where samples are checked, fill up in any order and survive a kill; it is recoded when nothing is
missing any more. A member is never larger coded than plain, so shard sizes and room hold as planned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from ..schemas.atomic import part_path
from ..schemas.index import ArrayPlace, CodedForm, IndexRow
from ..schemas.planes import PlanesHead, head_bytes, write_head
from ..schemas.sample import META_MEMBER, meta_content
from ..schemas.states import ArraySpec
from .file_scan import read_blocks
from .index_rows import meta_of
from .npy import PLAIN_HEADER_BYTES, npy_header
from .plan import DatasetLayout
from .planes import BLOCK_BYTES as STATE_BLOCK_BYTES
from .planes import block_checksum, encode_rows
from .read_back import other_bytes, read_back
from .tar_header import BLOCK, file_bytes, pad_to, tar_header
from .tar_writer import FileRange, copy_range, write_all
from .write_out import begin_write_out

_MOST_PLAIN_BLOCKS = (PLAIN_HEADER_BYTES - head_bytes(0)) // (head_bytes(1) - head_bytes(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """A shard file that is whole: what index and manifest say of it."""

    rows: tuple[IndexRow, ...]
    size_bytes: int
    sha256: str


@contextmanager
def plain_scratch(final: Path) -> Iterator[BinaryIO]:
    """Open a hidden sibling of `final` for the plain shard, and remove it in the end."""
    part = part_path(final, tag="plain")
    try:
        with part.open("w+b") as out:
            yield out
    finally:
        part.unlink(missing_ok=True)


def code_shard(source: BinaryIO, rows: Iterable[IndexRow], out: BinaryIO, layout: DatasetLayout) -> WrittenShard:
    """Write the samples that lie in the plain file `source` as `rows` say to the empty file `out`, in their order.

    `layout` is that of the coded shard.

    Raises:
        ShardReadBackError: an array of the source, or of what was written, is not the one that was checked.
        FileCutError: the source ends before an array does.
    """
    coded, end = [], 0
    for row in rows:
        writer = _SampleWriter(source, out, row, end)
        coded.append(writer.write(layout))
        begin_write_out(out.fileno(), end, writer.end - end)
        end = writer.end
    size_bytes = file_bytes(end)
    os.ftruncate(out.fileno(), size_bytes)
    sha256 = read_back(out, Path(out.name), coded, size_bytes)
    return WrittenShard(rows=tuple(coded), size_bytes=size_bytes, sha256=sha256)


class _SampleWriter:
    """Writes one sample, member after member."""

    def __init__(self, source: BinaryIO, out: BinaryIO, row: IndexRow, start: int) -> None:
        self._source = source
        self._out = out.fileno()
        self._row = row
        self.end = start

    def write(self, layout: DatasetLayout) -> IndexRow:
        """Return the row of the sample as it is written now."""
        content = meta_content(meta_of(self._row), layout.layers)
        self._close(META_MEMBER, content, len(content))
        arrays = {spec.name: self._array(spec) for spec in layout.specs}
        return replace(self._row, arrays=arrays)

    def _array(self, spec: ArraySpec) -> ArrayPlace:
        place, start = self._row.arrays[spec.name], self.end + BLOCK
        if not spec.is_state:
            header = npy_header(spec.dtype, (self._row.num_tokens, spec.width), PLAIN_HEADER_BYTES)
            copy_range(self._range(spec.name), self._out, start + len(header))
            self._close(spec.member, header, len(header) + place.length)
            return replace(place, offset=start + len(header))
        length, found = write_state(self._range(spec.name), self._out, start, spec)
        if found != place.xxh3_128:
            raise other_bytes(Path(self._source.name), self._row.key, spec.name)
        self._close(spec.member, b"", length)
        form = CodedForm(codec=spec.codec, length=length, dtype=spec.dtype, width=spec.width)
        return replace(place, offset=start, coded=form)

    def _range(self, array: str) -> FileRange:
        place = self._row.arrays[array]
        return FileRange(
            path=Path(self._source.name), handle=self._source.fileno(), offset=place.offset, length=place.length
        )

    def _close(self, member: str, head: bytes, size: int) -> None:
        """Write the member's tar header, and `head` behind it; the rest of its `size` bytes is there."""
        write_all(self._out, tar_header(f"{self._row.key}.{member}", size) + head, self.end)
        self.end += BLOCK + pad_to(size, BLOCK)


def write_state(source: FileRange, out: int, offset: int, spec: ArraySpec) -> tuple[int, str]:
    """Write a plain state as a coded member at `offset`, the end of the open file `out`; return its size and hash.

    Raises:
        FileCutError: the source ends first.
    """
    head, digest = _write_blocks(source, out, offset, spec, max(STATE_BLOCK_BYTES // spec.row_bytes, 1))
    if head.member_bytes > PLAIN_HEADER_BYTES + source.length:  # noise, and a long table of its blocks
        head = _write_as_it_is(source, out, offset, spec)
    write_all(out, write_head(head), offset)
    return head.member_bytes, digest


def _write_blocks(source: FileRange, out: int, offset: int, spec: ArraySpec, block_rows: int) -> tuple[PlanesHead, str]:
    num_rows = source.length // spec.row_bytes
    step = block_rows * spec.row_bytes
    digest = xxhash.xxh3_128()
    at = offset + head_bytes(-(-num_rows // block_rows))
    blocks = []
    for block in read_blocks(source.path, source.handle, source.offset, source.length, step):
        digest.update(block)
        coded = encode_rows(np.frombuffer(block, dtype="<u2").reshape(-1, spec.width))
        write_all(out, coded, at)
        blocks.append((len(coded), block_checksum(coded)))
        at += len(coded)
    head = PlanesHead(num_rows=num_rows, width=spec.width, block_rows=block_rows, blocks=tuple(blocks))
    return head, digest.hexdigest()


def _write_as_it_is(source: FileRange, out: int, offset: int, spec: ArraySpec) -> PlanesHead:
    """Write blocks that are not coded, so few that the head is no longer than that of a `.npy` array."""
    num_rows = source.length // spec.row_bytes
    block_rows = -(-num_rows // _MOST_PLAIN_BLOCKS)
    at = begin = offset + head_bytes(-(-num_rows // block_rows))
    blocks = []
    for first in range(0, num_rows, block_rows):
        length = min(block_rows, num_rows - first) * spec.row_bytes
        part = replace(source, offset=source.offset + first * spec.row_bytes, length=length)
        copy_range(part, out, at)
        blocks.append((length, _checksum(part)))
        at += length
    os.ftruncate(out, begin + source.length)  # the first try was longer, and what follows a member is zeros
    return PlanesHead(num_rows=num_rows, width=spec.width, block_rows=block_rows, blocks=tuple(blocks))


def _checksum(source: FileRange) -> int:
    """Return what the head's table says of a block of these bytes."""
    digest = xxhash.xxh3_64()
    for block in read_blocks(source.path, source.handle, source.offset, source.length):
        digest.update(block)
    return digest.intdigest() & 0xFFFFFFFF
