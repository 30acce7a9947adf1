"""Whole shards of a remote dataset, kept in a local folder: fetched when first needed, checked, then read from disk.

A shard appears under its name only when it is whole and has the manifest's sha256, so what is in the folder is trusted.
Processes that share the folder fetch each shard once. Nothing is ever removed but what killed ones left half-way.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..schemas.atomic import staged
from ..schemas.errors import StorageError
from ..schemas.index import IndexRow
from .remote_shards import RemoteReader, RemoteShards
from .shard_source import DatasetMismatchError, LocalShards
from .tar_writer import write_all

_PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedShards:
    """Shards of a place, with a folder that keeps them."""

    shards: RemoteShards
    folder: Path
    sha256: Mapping[str, str]

    def open(self, first_rows: Mapping[str, IndexRow]) -> CachedReader:
        """Return a reader."""
        return CachedReader(self, first_rows)


class CachedReader:
    """Reads from the folder what is there, and brings there what is not."""

    gap_bytes = 0
    range_bytes = 64 * 1024 * 1024
    threads = 2

    def __init__(self, cached: CachedShards, first_rows: Mapping[str, IndexRow]) -> None:
        """Fetch nothing yet."""
        self._cached = cached
        self._remote: RemoteReader = cached.shards.open(first_rows)
        self._local = LocalShards(root=cached.folder, written_at={}).open(first_rows)
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def name_of(self, shard: str) -> str:
        """Return the local path."""
        return self._local.name_of(shard)

    def read_into(self, shard: str, offset: int, target: memoryview) -> None:
        """Read a range from the folder; errors as those of both readers."""
        self._bring(shard)
        self._local.read_into(shard, offset, target)

    def check_shard(self, shard: str) -> None:
        """Look at the first sample."""
        self._bring(shard)
        self._local.check_shard(shard)

    def close(self) -> None:
        """Cut what is under way; a shard that is not whole leaves nothing behind."""
        self._remote.close()

    def _bring(self, shard: str) -> None:
        path = self._cached.folder / shard
        if path.exists():
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locks[shard], path.with_name(f".{path.name}.lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be bringing it
                if not path.exists():
                    for part in path.parent.glob(f".{path.name}.*.part"):
                        part.unlink()  # a killed process left it: who still writes one holds the lock
                    self._fetch(shard, path)
        except OSError as fault:
            raise StorageError(
                f"{path} can't be kept: {fault.strerror or fault}", mend="Give another cache_dir, or none"
            ) from None

    def _fetch(self, shard: str, path: Path) -> None:
        size = self._cached.shards.size_bytes[shard]
        with staged(path) as out:
            handle = out.fileno()
            os.truncate(handle, size)

            def piece(offset: int) -> None:
                content = memoryview(bytearray(min(_PIECE_BYTES, size - offset)))
                self._remote.read_into(shard, offset, content)
                write_all(handle, content, offset)

            with ThreadPoolExecutor(self._cached.shards.connections) as pool:
                for _ in pool.map(piece, range(0, size, _PIECE_BYTES)):
                    pass
            out.seek(0)
            found = hashlib.file_digest(out, "sha256").hexdigest()  # type: ignore[arg-type]  # a BinaryIO that is a file
            if found != self._cached.sha256[shard]:
                raise DatasetMismatchError(
                    f"{self._remote.name_of(shard)} has sha256 {found}, the manifest says {self._cached.sha256[shard]}",
                    why="It was damaged, or is of another packing",
                    mend="Push the dataset again",
                )
