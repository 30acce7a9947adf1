"""Shards far away, read by ranges: over HTTP with requests of our own, elsewhere through fsspec."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from ..schemas.counts import counted
from ..schemas.errors import StorageError
from ..schemas.index import IndexRow
from ..schemas.sample import SampleMeta
from .http_connection import shown
from .http_ranges import GO_ON, HttpFile, RangeClient, RemoteMissingError, RemoteRefusedError, unread
from .retries import Patience, RetryPolicy
from .shard_head import first_meta_of
from .shard_source import DatasetMismatchError, SeenShards, check_first_sample
from .tar_reader import OpenShard

_CHECK_STORE = "Check the address, and the login and endpoint in the store's own configuration"

_HEAD_BYTES = 64 * 1024
"""Holds the first sample's meta.json, which is a few kB."""


class RangeReader(Protocol):
    """Reads ranges of the files of a place."""

    def read_into(self, name: str, size_bytes: int, offset: int, target: memoryview) -> None:
        """Fill `target` from byte `offset` of a file that should have `size_bytes`."""
        ...

    def close(self) -> None:
        """Cut what is under way."""
        ...


class Place(Protocol):
    """Where a dataset lies; picklable."""

    @property
    def name(self) -> str:
        """What errors call it, without secrets."""
        ...

    def fetch(self, name: str) -> bytes:
        """Return a small file whole.

        Raises:
            RemoteMissingError: there is none.
            StorageError: it can't be had.
        """
        ...

    def open(self) -> RangeReader:
        """Return a reader for any number of threads."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPlace:
    """A folder on an HTTP server."""

    base_url: str
    query: str
    """Added to each URL, such as a signature."""

    headers: Mapping[str, str] = field(repr=False)
    name: str
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def file(self, name: str, size_bytes: int | None = None) -> HttpFile:
        """Return a file of the folder."""
        url = f"{self.base_url}{quote(name)}" + (f"?{self.query}" if self.query else "")
        return HttpFile(url=url, headers=self.headers, size_bytes=size_bytes)

    def fetch(self, name: str) -> bytes:
        """Return a small file whole; errors as `RangeClient.fetch`."""
        client = RangeClient(self.policy)
        try:
            return client.fetch(self.file(name))
        finally:
            client.close()

    def open(self) -> RangeReader:
        """Return a reader with connections of its own."""
        return _HttpReader(self)


class _HttpReader:
    def __init__(self, place: HttpPlace) -> None:
        self._place = place
        self._client = RangeClient(place.policy)

    def read_into(self, name: str, size_bytes: int, offset: int, target: memoryview) -> None:
        self._client.read_into(self._place.file(name, size_bytes), offset, target)

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecPlace:
    """A folder in any store that fsspec knows; logins are those of the store's own configuration."""

    url: str
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def name(self) -> str:
        """The URL."""
        return shown(self.url)

    def fetch(self, name: str) -> bytes:
        """Return a small file whole.

        Raises:
            RemoteMissingError, StorageError: as `Place.fetch`.
        """
        system, root = _system(self.url)
        where = f"{self.name}/{name}"
        try:
            with _naming(where):
                content: bytes = system.cat_file(f"{root}/{name}")
        except _StoreError as fault:
            raise StorageError(f"{where} can't be read: {fault.what}", mend=_CHECK_STORE) from None
        return content

    def open(self) -> RangeReader:
        """Return a reader."""
        return _FsspecReader(self)


class _FsspecReader:
    def __init__(self, place: FsspecPlace) -> None:
        self._place = place
        self._system, self._root = _system(place.url)
        self._is_closed = threading.Event()
        self._sized: set[str] = set()

    def read_into(self, name: str, size_bytes: int, offset: int, target: memoryview) -> None:
        path, where = f"{self._root}/{name}", f"{self._place.name}/{name}"
        patience = Patience(self._place.policy, self._is_closed)
        while True:
            try:
                self._check_size(name, path, where, size_bytes)
                with _naming(where):
                    content = self._system.cat_file(path, start=offset, end=offset + len(target))
            except _StoreError as fault:
                if not patience.wait():
                    raise unread(self._place.url, f"{name}, bytes {offset}", fault.what, mend=GO_ON) from None
                continue
            if len(content) == len(target):
                target[:] = content
                return
            if not patience.wait():
                came = f"{len(content):,} of {counted(len(target), 'byte')} came"
                raise unread(self._place.url, f"{name}, bytes {offset}", came, mend=GO_ON)

    def close(self) -> None:
        self._is_closed.set()

    def _check_size(self, name: str, path: str, where: str, size_bytes: int) -> None:
        if name not in self._sized:
            with _naming(where):
                size = int(self._system.size(path))
            _check_size(where, size, size_bytes)
            self._sized.add(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShards:
    """Shards of a place."""

    place: Place
    size_bytes: Mapping[str, int]
    """What the manifest says of each shard."""

    connections: int

    def open(self, first_rows: Mapping[str, IndexRow]) -> RemoteReader:
        """Return a reader with connections of its own."""
        return RemoteReader(self, first_rows)


class RemoteReader:
    """Reads ranges of remote shards."""

    gap_bytes = 64 * 1024
    """Headers and padding between two arrays are at most 11 kB: less than what a request of its own costs."""

    range_bytes = 8 * 1024 * 1024

    def __init__(self, shards: RemoteShards, first_rows: Mapping[str, IndexRow]) -> None:
        """Connect to nothing yet."""
        self.threads = shards.connections
        self._shards = shards
        self._ranges = shards.place.open()
        self._seen = SeenShards(first_rows)

    def name_of(self, shard: str) -> str:
        """Return place and name."""
        return f"{self._shards.place.name}/{shard}"

    def read_into(self, shard: str, offset: int, target: memoryview) -> None:
        """Read a range; errors as `RangeClient.read_into`."""
        self._ranges.read_into(shard, self._shards.size_bytes[shard], offset, target)

    def check_shard(self, shard: str) -> None:
        """Read the head of a shard, once, and look at its first sample.

        Raises:
            DatasetMismatchError: it is of another packing.
            What `read_into` and `shard_head.first_meta` do.
        """
        expected = self._seen.expected(shard)
        if expected is None:
            return
        size = self._shards.size_bytes[shard]
        head = bytearray(min(_HEAD_BYTES, size))
        self.read_into(shard, 0, memoryview(head))
        check_first_sample(_meta_in(bytes(head), size, self.name_of(shard)), expected, self.name_of(shard))

    def close(self) -> None:
        """Cut what is under way."""
        self._ranges.close()


def _meta_in(head: bytes, size_bytes: int, where: str) -> SampleMeta:
    """Read the first meta.json as that of a file: one in memory, of the shard's size, with nothing after its head."""
    handle = os.memfd_create("eaglehs-head")
    try:
        os.ftruncate(handle, size_bytes)
        os.pwrite(handle, head, 0)
        return first_meta_of(OpenShard(path=Path(where), handle=handle, size_bytes=size_bytes))
    finally:
        os.close(handle)


def _check_size(where: str, served: int, said: int) -> None:
    if served != said:
        raise DatasetMismatchError(
            f"{where} has {counted(served, 'byte')}, the manifest says {said:,}",
            why="It was cut on its way there, or is of another packing",
            mend="Push the dataset again",
        )


def _system(url: str) -> tuple[Any, str]:
    import fsspec  # type: ignore[import-untyped]  # it has no types

    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as fault:
        raise StorageError(f"{shown(url)} can't be opened: {fault}", mend="Install the package that it names") from None
    except Exception as fault:  # noqa: BLE001 - a client that logs in at once has errors of its own
        raise StorageError(f"{shown(url)} can't be opened: {_StoreError(fault).what}", mend=_CHECK_STORE) from None
    return system, root.rstrip("/")


class _StoreError(Exception):
    """A store's client failed; what it wants may work later."""

    def __init__(self, fault: Exception) -> None:
        text = str(fault)[:200]
        self.what = text if type(fault) is OSError and text else f"{type(fault).__name__}: {text}"
        super().__init__(self.what)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Tell what a store's client raises: a missing or refused file, else a _StoreError."""
    try:
        yield
    except FileNotFoundError:
        raise RemoteMissingError(f"{where}: there is no such file") from None
    except PermissionError as fault:
        raise RemoteRefusedError(f"{where}: the store refuses it ({str(fault)[:200]})", mend=_CHECK_STORE) from None
    except Exception as fault:  # noqa: BLE001 - only clients' code is inside; botocore's and gcsfs' errors are no OSError
        raise _StoreError(fault) from None
