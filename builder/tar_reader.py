"""Reads a shard's structure, strictly: what the writer never writes, the reader refuses, with file, member and offset.

    read_members    tar headers in file order, up to the two blocks of zeros that end the archive
    read_samples    members grouped to samples: `meta.json`, then the arrays of the layout in their order, nothing else

Only headers, `meta.json` and the filling between members are read; builder/tar_writer.py is the twin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ..schemas.codec import loads
from ..schemas.counts import counted
from ..schemas.errors import DataError, RecordError
from ..schemas.index import ArrayPlace, CodedForm, IndexRow
from ..schemas.planes import FIXED, PlanesHead, read_head, size_of_head
from ..schemas.sample import META_MEMBER, SampleMeta
from ..schemas.states import ArraySpec, Codec
from .index_rows import row_of
from .npy import parse_npy_header
from .plan import DatasetLayout
from .tar_header import BLOCK, END_BYTES, RECORD, pad_to, parse_tar_header

MAX_NPY_HEADER = 10_240
"""Bytes of a member that hold its `.npy` header, as far as numpy reads one."""

_MAX_META_BYTES = 1024 * 1024


class ShardStructureError(DataError):
    """A shard is cut, or its members are not those of whole samples in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """One member of a shard."""

    name: str
    header_offset: int
    size: int

    @property
    def offset(self) -> int:
        """Where its content begins."""
        return self.header_offset + BLOCK

    @property
    def key(self) -> str:
        """The name up to the first dot."""
        return self.name.partition(".")[0]

    @property
    def column(self) -> str:
        """The name after the first dot."""
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """A shard that is open for reading."""

    path: Path
    handle: int
    size_bytes: int

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes."""
        return os.pread(self.handle, length, offset)

    def fault(self, offset: int, what: str, *, why: str = "") -> ShardStructureError:
        """Return the error for something found at `offset`."""
        return ShardStructureError(f"{self.path} at byte {offset}: {what}", why=why)


def read_members(shard: OpenShard) -> Iterator[TarMember]:
    """Yield the members in file order.

    Raises:
        TarHeaderError: a header is not that of a plain USTAR member.
        ShardStructureError: the file is cut, not filled with zeros, or goes on after its end.
    """
    offset = 0
    while True:
        block = shard.read(offset, BLOCK)
        if len(block) == BLOCK and not any(block):
            _check_end(shard, offset)
            return
        header = parse_tar_header(block, where=f"{shard.path} at byte {offset}")
        member = TarMember(name=header.name, header_offset=offset, size=header.size)
        end = member.offset + member.size
        filled = pad_to(end, BLOCK)
        if filled + END_BYTES > shard.size_bytes:
            raise shard.fault(
                offset,
                f"{member.name} needs {counted(member.size, 'byte')}, the file ends at {shard.size_bytes:,}",
                why="It was cut",
            )
        if any(shard.read(end, filled - end)):
            raise shard.fault(end, f"the filling after {member.name} is not zeros")
        yield member
        offset = filled


def read_samples(shard: OpenShard, name: str, layout: DatasetLayout) -> Iterator[IndexRow]:
    """Yield the samples of a shard as rows of the index; `name` is the shard's in the manifest.

    Raises:
        TarHeaderError, NpyHeaderError, RecordError, ShardStructureError: the file is no shard of this layout.
    """
    seen: set[str] = set()
    for key, group in groupby(read_members(shard), key=lambda member: member.key):
        members = list(group)
        if key in seen:
            raise shard.fault(members[0].header_offset, f"{members[0].name} stands apart from its sample")
        seen.add(key)
        _check_columns(shard, members, layout)
        meta = read_meta(shard, members[0])
        pairs = zip(members[1:], layout.specs, strict=True)
        arrays = {spec.name: _place(shard, member, spec, meta) for member, spec in pairs}
        yield row_of(meta, name, arrays)
    if not seen:
        raise shard.fault(0, "the shard holds no sample", why="Stock readers fail on an empty tar")


def _check_end(shard: OpenShard, offset: int) -> None:
    rest = shard.size_bytes - offset
    if rest < END_BYTES or shard.size_bytes % RECORD:
        raise shard.fault(
            offset, f"the archive's end is cut: the file has {counted(shard.size_bytes, 'byte')}", why="It was cut"
        )
    for start in range(offset, shard.size_bytes, RECORD):
        if any(shard.read(start, RECORD)):
            raise shard.fault(start, "bytes after the archive's end", why="Two files were joined, or it was damaged")


def _check_columns(shard: OpenShard, members: list[TarMember], layout: DatasetLayout) -> None:
    wanted = [META_MEMBER, *(spec.member for spec in layout.specs)]
    found = [member.column for member in members]
    if found == wanted:
        return
    key, offset = members[0].key, members[0].header_offset
    for problem, columns in (
        ("lacks", [column for column in wanted if column not in found]),
        ("has an unknown", [column for column in found if column not in wanted]),
        ("has twice", [column for column in wanted if found.count(column) > 1]),
    ):
        if columns:
            raise shard.fault(offset, f"sample {key} {problem} {columns[0]}")
    raise shard.fault(offset, f"sample {key} has its members in the order {', '.join(found)}")


def read_meta(shard: OpenShard, member: TarMember) -> SampleMeta:
    """Return what a `meta.json` says.

    Raises:
        RecordError: it is too large, no UTF-8, no record of a sample, or another sample's.
    """
    where = f"{shard.path}: {member.name}"
    if member.size > _MAX_META_BYTES:
        raise RecordError(f"has {counted(member.size, 'byte')}", where=where)
    try:
        text = shard.read(member.offset, member.size).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise RecordError("is not UTF-8 text", where=where) from None
    meta = loads(SampleMeta, text, where=where)
    if meta.key != member.key:
        raise RecordError(f"is of key {meta.key}", where=where)
    return meta


def _place(shard: OpenShard, member: TarMember, spec: ArraySpec, meta: SampleMeta) -> ArrayPlace:
    where = f"{shard.path}: {member.name}"
    if spec.name not in meta.xxh3_128:
        raise RecordError(f"{META_MEMBER} has no hash of {spec.name}", where=where)
    if spec.codec is not Codec.PLAIN:
        return _coded_place(shard, member, spec, meta)
    header = parse_npy_header(shard.read(member.offset, min(member.size, MAX_NPY_HEADER)), where=where)
    length = member.size - header.header_bytes
    found = (header.dtype, header.shape, length)
    wanted = (spec.dtype, (meta.num_tokens, spec.width), meta.num_tokens * spec.row_bytes)
    if found != wanted:
        raise shard.fault(
            member.header_offset,
            f"{member.name} is {found[0]} {list(found[1])} in {counted(length, 'byte')}, "
            f"expected {wanted[0]} {list(wanted[1])} in {wanted[2]:,}",
        )
    return ArrayPlace(offset=member.offset + header.header_bytes, length=length, xxh3_128=meta.xxh3_128[spec.name])


def planes_head(shard: OpenShard, member: TarMember) -> PlanesHead:
    """Return the head of a coded state, by which the member has the size that it has.

    Raises:
        PlanesHeadError: it is cut or damaged.
        ShardStructureError: the member has another size.
    """
    where = f"{shard.path}: {member.name}"
    fixed = shard.read(member.offset, min(FIXED.size, member.size))
    size = min(size_of_head(fixed, where=where), member.size)
    head = read_head(shard.read(member.offset, size), where=where)
    if head.member_bytes != member.size:
        raise shard.fault(
            member.header_offset,
            f"{member.name} has {counted(member.size, 'byte')}, {head.member_bytes:,} by its head",
            why="A block is missing, cut or doubled",
        )
    return head


def _coded_place(shard: OpenShard, member: TarMember, spec: ArraySpec, meta: SampleMeta) -> ArrayPlace:
    head = planes_head(shard, member)
    if (head.num_rows, head.width) != (meta.num_tokens, spec.width):
        raise shard.fault(
            member.header_offset,
            f"{member.name} is [{head.num_rows}, {head.width}], expected [{meta.num_tokens}, {spec.width}]",
        )
    return ArrayPlace(
        offset=member.offset,
        length=meta.num_tokens * spec.row_bytes,
        xxh3_128=meta.xxh3_128[spec.name],
        coded=CodedForm(codec=spec.codec, length=member.size, dtype=spec.dtype, width=spec.width),
    )
