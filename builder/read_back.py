"""Reads a shard back while it is being written: its SHA-256, and each array against the hash of its check.

What is in the shard is what was checked. SHA-256 is the dearest step of a pack (1.8 GB/s a core; a check and a copy
together take about as long), so it has a thread of its own that follows the writer from sample to sample; reads and
hashes let go of the GIL. The bytes are still in the page cache then.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import xxhash

from ..schemas.errors import StorageError
from ..schemas.sample import SampleMeta
from .file_scan import Region, scan_file
from .plan import META, MemberPlan, PlacedSample


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
        self._written: queue.SimpleQueue[tuple[PlacedSample, SampleMeta] | None] = queue.SimpleQueue()
        self._is_given_up = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-back")
        self._sha256 = self._pool.submit(_scan, path, out.fileno(), size_bytes, self._samples())

    def add(self, placed: PlacedSample, meta: SampleMeta) -> None:
        """Tell that the next sample, in file order, is in the file whole."""
        self._written.put((placed, meta))

    def sha256(self) -> str:
        """Return the SHA-256 of the file, all samples of which were added.

        Raises:
            ShardReadBackError: an array has another hash than its meta says.
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

    def _samples(self) -> Iterator[tuple[PlacedSample, SampleMeta]]:
        while (sample := self._written.get()) is not None:
            if self._is_given_up:
                raise _GivenUpError
            yield sample
        if self._is_given_up:
            raise _GivenUpError


class _GivenUpError(Exception):
    """Nobody asks for the hash any more."""


def read_back(out: BinaryIO, path: Path, samples: Iterable[tuple[PlacedSample, SampleMeta]], size_bytes: int) -> str:
    """Read a written shard once; return its SHA-256 if each array has the hash that its `meta.json` says.

    Raises:
        ShardReadBackError: an array differs.
        FileCutError: the file ends before `size_bytes`.
    """
    return _scan(path, out.fileno(), size_bytes, samples)


def _scan(path: Path, handle: int, size_bytes: int, samples: Iterable[tuple[PlacedSample, SampleMeta]]) -> str:
    whole = hashlib.sha256()
    scan_file(path, handle, size_bytes, _regions(path, samples), whole.update)
    return whole.hexdigest()


def _regions(path: Path, samples: Iterable[tuple[PlacedSample, SampleMeta]]) -> Iterator[Region]:
    """Yield each array; nothing from a sample's begin on is read before it is here: a writer may be at work on it."""
    for placed, meta in samples:
        for member in placed.members:
            if member.array != META:
                yield from _checked(path, placed.key, member, meta.xxh3_128)


def _checked(path: Path, key: str, member: MemberPlan, xxh3_128: Mapping[str, str]) -> Iterator[Region]:
    """Yield the array's place; when the next is asked for, it has been read and is compared."""
    digest = xxhash.xxh3_128()
    yield Region(offset=member.data_offset, length=member.data_bytes, row_bytes=1, take=digest.update)
    if digest.hexdigest() != xxh3_128[member.array]:
        raise ShardReadBackError(
            key,
            f"{path}: {member.array} of {key} reads back other bytes than were checked",
            why="A dump was changed while it was packed, or the disk is failing",
            mend="Stop what writes to the run's folder, and run the same command again",
        )
