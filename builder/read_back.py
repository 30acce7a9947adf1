"""Reads a shard back while it is being written: its SHA-256, and each array against the hash of its check.

What is in the shard is what was checked. SHA-256 is the dearest step of a pack (1.8 GB/s a core; a check and a copy
together take about as long), so it has a thread of its own that follows the writer from sample to sample; reads and
hashes let go of the GIL. The bytes are still in the page cache then.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

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


class ReadBack:
    """Follows the writer of one shard; a context manager, whose end waits for its thread, done or given up."""

    def __init__(self, out: BinaryIO, path: Path, size_bytes: int) -> None:
        """`out` is the shard's file, of its final size already; `path` is for errors."""
        self._written: queue.SimpleQueue[IndexRow | None] = queue.SimpleQueue()
        self._is_given_up = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-back")
        self._sha256 = self._pool.submit(_scan, path, out.fileno(), size_bytes, self._samples())

    def add(self, row: IndexRow) -> None:
        """Tell that the next sample, in file order, is in the file whole, and where its arrays lie."""
        self._written.put(row)

    def sha256(self) -> str:
        """Return the SHA-256 of the file, all samples of which were added.

        Raises:
            ShardReadBackError: an array has another hash than its row says.
            FileCutError: the file has become shorter.
            OSError: it can't be read.
        """
        self._written.put(None)
        return self._sha256.result()

    def __enter__(self) -> Self:
        """The thread runs already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None) -> None:
        """Give up what is not read yet, and wait: the caller closes the file next."""
        self._is_given_up = True
        self._written.put(None)
        self._pool.shutdown()

    def _samples(self) -> Iterator[IndexRow]:
        while (row := self._written.get()) is not None:
            if self._is_given_up:
                raise _GivenUpError
            yield row
        if self._is_given_up:
            raise _GivenUpError


class _GivenUpError(Exception):
    """Nobody asks for the hash any more."""


def read_back(out: BinaryIO, path: Path, rows: Iterable[IndexRow], size_bytes: int) -> str:
    """Read a written shard once; return its SHA-256 if each array, decoded, has the hash that its row says.

    Raises:
        ShardReadBackError: an array differs.
        FileCutError: the file ends before `size_bytes`.
    """
    return _scan(path, out.fileno(), size_bytes, rows)


def other_bytes(path: Path, key: str, array: str) -> ShardReadBackError:
    """Return the error for an array of `path` that is not the one that was checked."""
    return ShardReadBackError(
        key,
        f"{path}: {array} of {key} reads back other bytes than were checked",
        why="A dump was changed while it was packed, or the disk is failing",
        mend="Stop what writes to the run's folder, and run the same command again",
    )


def _scan(path: Path, handle: int, size_bytes: int, rows: Iterable[IndexRow]) -> str:
    whole = hashlib.sha256()
    scan_file(path, handle, size_bytes, _regions(path, rows), whole.update)
    return whole.hexdigest()


def _regions(path: Path, rows: Iterable[IndexRow]) -> Iterator[Region]:
    """Yield each array; nothing from a sample's begin on is read before it is here: a writer may be at work on it."""
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
