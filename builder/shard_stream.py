"""Writes a shard's samples in the plan's order, from its first byte to its last, and tells what was written.

    ShardStream(file, shard)
    .write_sample(placed, ...)    headers, meta.json, and each array, held against its hash; zeros in gaps
    .finish()                     the end of the tar -> SHA-256 of the shard

The same bytes as builder/tar_writer.py, which may write in any order. Arrays are read straight into the memory that the
shard is written from, and hashed there: what is hashed is what is in the shard.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import xxhash

from ..schemas.sample import SampleMeta, meta_content
from .file_scan import BLOCK_BYTES
from .plan import META, MemberPlan, PlacedSample, ShardPlan
from .sequential_file import SequentialFile
from .tar_writer import FileRange, SourceChangedError, check_length, member_header, read_error, source_cut

ArrayPiece = bytes | FileRange
"""Part of an array's bytes, in row order."""


class ShardStream:
    """One shard under construction, for one thread."""

    def __init__(self, out: SequentialFile, shard: ShardPlan) -> None:
        """`out` is empty."""
        self._out = out
        self._shard = shard

    def write_sample(self, placed: PlacedSample, meta: SampleMeta, arrays: Mapping[str, Sequence[ArrayPiece]]) -> None:
        """Append all members of the plan's next sample; `arrays` has the pieces of each array by name.

        Raises:
            SourceCutError: a dump ended before the range that was promised.
            SourceChangedError: an array has another hash than `meta` says.
            SourceReadError: a dump can't be read.
            OSError: the shard can't be written.
        """
        for member in placed.members:
            self._zeros_to(member.header_offset)
            self._out.write(member_header(placed, member))
            if member.array == META:
                self._out.write(meta_content(meta, placed.layout.layers))
            else:
                self._write_array(member, arrays[member.array], meta)

    def finish(self) -> str:
        """End the tar and return its SHA-256, in hex.

        Raises:
            OSError: the shard can't be written.
        """
        self._zeros_to(self._shard.size_bytes)
        return self._out.finish()

    def _write_array(self, member: MemberPlan, pieces: Sequence[ArrayPiece], meta: SampleMeta) -> None:
        check_length(member, pieces)
        digest = xxhash.xxh3_128()
        for piece in pieces:
            if isinstance(piece, FileRange):
                self._append(piece, digest)
            else:
                digest.update(piece)
                self._out.write(piece)
        if digest.hexdigest() != meta.xxh3_128[member.array]:
            raise SourceChangedError(
                f"{member.array} of {meta.key} has other bytes than when it was checked",
                why="A dump was changed while it was packed, or the disk is failing",
                mend="Stop what writes to the run's folder and pack again",
            )

    def _zeros_to(self, offset: int) -> None:
        gap = offset - self._out.size_bytes
        assert gap >= 0, f"{self._shard.name}: at {self._out.size_bytes}, past {offset}"
        self._out.zeros(gap)

    def _append(self, source: FileRange, digest: xxhash.xxh3_128) -> None:
        done = 0
        while done < source.length:
            room = self._out.room(min(source.length - done, BLOCK_BYTES))
            try:
                count = os.preadv(source.handle, [room], source.offset + done)
            except OSError as fault:  # told apart here from those of the shard's own disk
                raise read_error(source, fault) from None
            if count == 0:
                raise source_cut(source, done)
            digest.update(room[:count])
            self._out.advance(count)
            done += count
