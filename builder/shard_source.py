"""Where shards are: a record that may go to another process, and the reader that it opens there.

ShardSource   what and where; picklable
ShardReader   open files and connections of one pass, for any number of threads
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..schemas.counts import counted
from ..schemas.errors import DataError, StorageError
from ..schemas.index import IndexRow
from ..schemas.sample import SampleMeta
from .file_map import open_to_read, read_range
from .shard_head import first_meta


class DatasetMismatchError(DataError):
    """Manifest, index and shards are not of one dataset."""


class ShardReader(Protocol):
    """Reads ranges of shards; safe in many threads."""

    gap_bytes: int
    """Wanted ranges this near to one another are read as one."""

    range_bytes: int
    """The longest range that is read in one go."""

    threads: int
    """How many ranges are worth reading at a time."""

    def name_of(self, shard: str) -> str:
        """Return what errors call a shard: a path, or a URL without secrets."""
        ...

    def read_into(self, shard: str, offset: int, target: memoryview) -> None:
        """Fill `target` from byte `offset` of the shard `shard`, a name of the manifest."""
        ...

    def check_shard(self, shard: str) -> None:
        """Refuse a shard that is of another packing; looks once a shard."""
        ...

    def close(self) -> None:
        """Stop what is being read, as soon as may be, and close connections."""
        ...


class ShardSource(Protocol):
    """Where the shards of a dataset are."""

    def open(self, first_rows: Mapping[str, IndexRow]) -> ShardReader:
        """Return a reader; `first_rows` has the first sample of each shard, by which shards are told."""
        ...


class SeenShards:
    """Which shards were found to be the dataset's own."""

    def __init__(self, first_rows: Mapping[str, IndexRow]) -> None:
        """No shard has been looked at."""
        self._first_rows = first_rows
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def expected(self, shard: str) -> IndexRow | None:
        """Return the first sample that the shard must have; None where that was asked before."""
        with self._lock:
            if shard in self._seen:
                return None
            self._seen.add(shard)
        return self._first_rows[shard]


def check_first_sample(meta: SampleMeta, first: IndexRow, where: str) -> None:
    """Refuse a shard that begins with `meta` where the index says `first`: a file of another packing.

    Raises:
        DatasetMismatchError: another key, length or other checksums.
    """
    expected = {name: place.xxh3_128 for name, place in first.arrays.items()}
    if (meta.key, meta.num_tokens, meta.xxh3_128) != (first.key, first.num_tokens, expected):
        what = f"sample {meta.key}" if meta.key != first.key else f"another extraction of sample {meta.key}"
        raise DatasetMismatchError(
            f"{where} begins with {what}, but the index says {first.key} of {counted(first.num_tokens, 'token')}",
            why="The shard, or the index, is of another packing",
            mend="Copy the whole dataset again",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShards:
    """Shards in a local folder."""

    root: Path

    written_at: Mapping[str, int]
    """When each shard was last written to, in ns, as the dataset was opened; one that is not in it may change."""

    def open(self, first_rows: Mapping[str, IndexRow]) -> LocalReader:
        """Return a reader of the folder."""
        return LocalReader(self, first_rows)


class LocalReader:
    """Reads local shards with `preadv`, which lets other threads run."""

    gap_bytes = 0
    range_bytes = 64 * 1024 * 1024
    threads = 2

    def __init__(self, source: LocalShards, first_rows: Mapping[str, IndexRow]) -> None:
        """Keep no file open: opening one costs a few microseconds."""
        self._root = source.root
        self._written_at = source.written_at
        self._shards = SeenShards(first_rows)

    def name_of(self, shard: str) -> str:
        """Return the path."""
        return str(self._root / shard)

    def read_into(self, shard: str, offset: int, target: memoryview) -> None:
        """Read a range.

        Raises:
            ShardCutError: the file ends before it.
            StorageError: the file can't be opened.
            DatasetMismatchError: it was written again since the dataset was opened.
        """
        path = self._root / shard
        handle = open_to_read(path)
        try:
            read_range(handle, path, offset, target)
            self._check_is_as_opened(shard, os.fstat(handle))
        finally:
            os.close(handle)

    def check_shard(self, shard: str) -> None:
        """Look at the first sample; errors as `check_first_sample` and `shard_head.first_meta`."""
        expected = self._shards.expected(shard)
        if expected is not None:
            check_first_sample(first_meta(self._root / shard), expected, self.name_of(shard))

    def check_mapped(self, shard: str) -> None:
        """Refuse a shard that was written again before it was mapped just now; errors as `read_into`."""
        path = self._root / shard
        try:
            self._check_is_as_opened(shard, path.stat())
        except OSError as fault:
            raise StorageError(f"{path} can't be opened: {fault.strerror}") from None

    def _check_is_as_opened(self, shard: str, found: os.stat_result) -> None:
        if found.st_mtime_ns != self._written_at.get(shard, found.st_mtime_ns):
            raise DatasetMismatchError(
                f"{self._root / shard} was written again after the dataset was opened",
                why="Another pack into the folder, or a copy over it: the index that was read may be of other bytes",
                mend="Open the stream again when that has ended",
            )

    def close(self) -> None:
        """Do nothing: nothing is open."""
