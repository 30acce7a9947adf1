"""Writes whole samples to their planned place in a shard, in any order. Tensor bytes stay inside the kernel.

    ShardWriter(file, plan)       the file gets its final size; what is not written reads as zeros: padding and end
    .write_sample(placed, ...)    headers, meta.json, and each array from its pieces; any order, any number of times

The caller opens the file under a hidden name and renames it when all samples are in (schemas/atomic.py). A shard that
is written from begin to end has a faster way (builder/shard_stream.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ..schemas.counts import counted
from ..schemas.errors import DataError
from ..schemas.sample import SampleMeta, meta_content
from .npy import npy_header
from .plan import META, MemberPlan, PlacedSample, ShardPlan
from .tar_header import tar_header
from .write_out import begin_write_out

_STEP_BYTES = 64 * 1024 * 1024
"""Bytes of one kernel copy: long enough to cost nothing, short enough that Ctrl-C is heard."""

_BUFFER_BYTES = 4 * 1024 * 1024
_OF_THE_TARGET = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What no way of copying mends. Any other answer may be a kernel's that can't copy in this way, or come of either file:
the next way is tried, and the last one tells."""


class SourceCutError(DataError):
    """A dump became shorter between its check and its copy."""


class SourceChangedError(DataError):
    """A dump has other bytes than when it was checked."""


class SourceReadError(OSError):
    """The file that is copied can't be read; `filename` is its path. Any other OSError of a copy is the target's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Bytes of an open file."""

    path: Path
    """For errors."""

    handle: int
    """File descriptor, open for reading; its position is neither used nor changed."""

    offset: int
    length: int

    def copy_to(self, out: int, offset: int) -> None:
        """Copy the range to `offset` of `out`; errors as `copy_range`."""
        copy_range(self, out, offset)


class Copied(Protocol):
    """Bytes that come by themselves."""

    @property
    def length(self) -> int:
        """How many."""
        ...

    def copy_to(self, out: int, offset: int) -> None:
        """Write them at `offset` of the open file `out`."""
        ...


Piece = bytes | memoryview | Copied
"""Part of an array's bytes, in row order."""


class ShardWriter:
    """One shard under construction; one thread at a time."""

    def __init__(self, out: BinaryIO, shard: ShardPlan) -> None:
        """Give the open file `out` the shard's final size; a part file that is taken up again keeps its content."""
        self._out = out.fileno()
        self._shard = shard
        os.ftruncate(self._out, shard.size_bytes)

    def write_sample(self, placed: PlacedSample, meta: SampleMeta, arrays: Mapping[str, Sequence[Piece]]) -> None:
        """Write all members of one sample to their place; `arrays` has the pieces of each array by name.

        The hashes of `meta` are taken as they are.

        Raises:
            SourceCutError: a dump ended before the range that was promised.
            SourceReadError: a dump can't be read.
            OSError: the shard can't be written.
        """
        for member in placed.members:
            pieces = [meta_content(meta, placed.layout.layers)] if member.array == META else arrays[member.array]
            check_length(member, pieces)
            write_all(self._out, member_header(placed, member), member.header_offset)
            self._write_pieces(member, pieces)
        begin_write_out(self._out, placed.start, placed.end - placed.start)

    def _write_pieces(self, member: MemberPlan, pieces: Sequence[Piece]) -> None:
        offset = member.data_offset
        for piece in pieces:
            if isinstance(piece, bytes | memoryview):
                write_all(self._out, piece, offset)
            else:
                piece.copy_to(self._out, offset)
            offset += _length(piece)


def member_header(placed: PlacedSample, member: MemberPlan) -> bytes:
    """Return what stands before a member's data: the tar header, and an array's `.npy` header."""
    header = tar_header(member.name, member.size)
    if member.array == META:
        return header
    [spec] = (spec for spec in placed.layout.specs if spec.name == member.array)
    return header + npy_header(spec.dtype, (placed.sample.num_tokens, spec.width), member.npy_bytes)


def check_length(member: MemberPlan, pieces: Sequence[Piece]) -> None:
    """Assert that the pieces fill a member's place."""
    length = sum(_length(piece) for piece in pieces)
    assert length == member.data_bytes, f"{member.name}: {counted(length, 'byte')} for a place of {member.data_bytes}"


def copy_range(source: FileRange, out: int, offset: int) -> None:
    """Copy a range of one file to `offset` of the open file `out`: in the kernel where it can, else through a buffer.

    Raises:
        SourceCutError: the source ends before the range does.
        SourceReadError: the source can't be read.
        OSError: the target can't be written.
    """
    done = 0
    for way in (_copy_file_range, _sendfile, _read_write):
        try:
            while done < source.length:
                step = way(source, out, offset, done)
                if step == 0:  # some kernels answer 0 for files that they can't copy: the next way tells
                    break
                done += step
        except OSError as fault:
            if fault.errno in _OF_THE_TARGET or way is _read_write:
                raise
        if done == source.length:
            return
    raise source_cut(source, done)


def source_cut(source: FileRange, done: int) -> SourceCutError:
    """Return the error for a range of which only the first `done` bytes are there."""
    return SourceCutError(
        f"{source.path}: ends {counted(source.length - done, 'byte')} before the array at offset {source.offset} does",
        why="The file was changed while it was packed",
        mend="Stop what writes to the run's folder and pack again",
    )


def read_error(source: FileRange, fault: OSError) -> SourceReadError:
    """Return the error for a range whose file the disk does not give any more."""
    return SourceReadError(fault.errno, fault.strerror or str(fault), str(source.path))


def _copy_file_range(source: FileRange, out: int, offset: int, done: int) -> int:
    step = min(source.length - done, _STEP_BYTES)
    return os.copy_file_range(source.handle, out, step, offset_src=source.offset + done, offset_dst=offset + done)


def _sendfile(source: FileRange, out: int, offset: int, done: int) -> int:
    os.lseek(out, offset + done, os.SEEK_SET)
    return os.sendfile(out, source.handle, source.offset + done, min(source.length - done, _STEP_BYTES))


def _read_write(source: FileRange, out: int, offset: int, done: int) -> int:
    try:
        block = os.pread(source.handle, min(source.length - done, _BUFFER_BYTES), source.offset + done)
    except OSError as fault:
        raise read_error(source, fault) from None
    write_all(out, block, offset + done)
    return len(block)


def write_all(out: int, content: bytes | memoryview, offset: int) -> None:
    """Write `content` at `offset` of the open file `out`."""
    view = memoryview(content).cast("B")
    while view:
        written = os.pwrite(out, view, offset)
        view, offset = view[written:], offset + written


def _length(piece: Piece) -> int:
    return memoryview(piece).nbytes if isinstance(piece, bytes | memoryview) else piece.length
