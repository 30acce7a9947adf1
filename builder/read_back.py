"""Reads a written shard back: its SHA-256, and each array against the hash of its check.

For shards whose samples were written in any order; one that is written from begin to end is hashed on the way
(builder/shard_stream).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from ..schemas.errors import StorageError
from ..schemas.index import IndexRow
from .file_scan import Region, scan_file
from .planes_read import PlanesFeed


class ShardReadBackError(StorageError):
    """A shard's bytes are not those that were written to it."""

    def __init__(self, key: str, what: str, *, why: str = "", mend: str = "") -> None:
        """`key` is the sample's."""
        self.key = key
        super().__init__(what, why=why, mend=mend)


def read_back(out: BinaryIO, path: Path, rows: Iterable[IndexRow], size_bytes: int) -> str:
    """Read a written shard once; return its SHA-256 if each array, decoded, has the hash that its row says.

    Raises:
        ShardReadBackError: an array differs.
        FileCutError: the file ends before `size_bytes`.
    """
    whole = hashlib.sha256()
    scan_file(path, out.fileno(), size_bytes, _regions(path, rows), whole.update)
    return whole.hexdigest()


def other_bytes(path: Path, key: str, array: str) -> ShardReadBackError:
    """Return the error for an array of `path` that is not the one that was checked."""
    return ShardReadBackError(
        key,
        f"{path}: {array} of {key} reads back other bytes than were checked",
        why="A dump was changed while it was packed, or the disk is failing",
        mend="Stop what writes to the run's folder, and run the same command again",
    )


def _regions(path: Path, rows: Iterable[IndexRow]) -> Iterator[Region]:
    for row in rows:
        for name in row.arrays:
            yield from _checked(path, row, name)


def _checked(path: Path, row: IndexRow, name: str) -> Iterator[Region]:
    """Yield the array's place; when the next is asked for, it has been read and is compared."""
    place, digest = row.arrays[name], xxhash.xxh3_128()
    if place.coded is None:
        yield Region(offset=place.offset, length=place.length, row_bytes=1, take=digest.update)
        is_whole = True
    else:
        feed = PlanesFeed(
            row, name, lambda rows_NH: digest.update(rows_NH.data), where=f"{path}: {name} of sample {row.key}"
        )
        yield Region(offset=place.offset, length=place.stored_bytes, row_bytes=1, take=feed.update)
        is_whole = feed.end() is None
    if not is_whole or digest.hexdigest() != place.xxh3_128:
        raise other_bytes(path, row.key, name)
