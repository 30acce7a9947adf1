"""What a pack leaves on disk while it runs, so that a killed one is taken up again at the unfinished shard.

    dataset/.lock                       held by the process that packs
    dataset/_index/.pack/claim.json     the run, and every shard name that its packs may have written
    dataset/_index/.pack/<shard>.parquet   a finished shard: its record as metadata, its rows of the index
    dataset/_index/.pack/<shard>.pushed.json   it is on the Hub and not here any more: builder/pushed_shards.py
    dataset/_index/.pack/published.json   and there is the whole dataset

A shard's file counts only with its record, and the record only if its fingerprint is that of the plan. They stay after
the end: a later pack of the same run, with samples that failed before, redoes their shards only. Names with a leading
dot are no part of the dataset; publishing leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import pyarrow as pa

from ..schemas import codec
from ..schemas.atomic import make_folder, staged
from ..schemas.errors import DataError, RecordError, StorageError, UsageError
from ..schemas.index import IndexRow
from ..schemas.locks import take_lock
from ..schemas.manifest import DatasetFolder, ShardEntry
from .index_store import index_schema, index_table, read_index_head, read_index_table, write_index
from .plan import DatasetLayout
from .pushed_shards import PushedShards

LOCK_FILENAME = ".lock"
_RECORD_KEY = "eaglehs.shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A sample whose dumps were refused while packing."""

    key: str
    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShard:
    """One shard as a pack finished it."""

    KIND: ClassVar[str] = "eaglehs.packed_shard"
    VERSION: ClassVar[int] = 1

    fingerprint: str
    """Over all that its bytes depend on: see builder/pack.py."""

    entry: ShardEntry | None
    """None where no sample of the shard is good: then there is no file."""

    num_trainable: int
    norm_sums: dict[str, float]
    """State -> sum over samples of mean row norm times tokens."""

    set_aside: tuple[SetAside, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Whose the folder is, and which shards in it are a pack's to replace or remove."""

    KIND: ClassVar[str] = "eaglehs.pack_claim"
    VERSION: ClassVar[int] = 1

    run_id: str
    shards: tuple[str, ...]


class PackState:
    """The hidden records of one dataset folder."""

    def __init__(self, folder: DatasetFolder, layout: DatasetLayout) -> None:
        """Nothing is read or made yet; `layout` is that of finished shards."""
        self.root = folder.index.parent / ".pack"
        self._folder = folder
        self._layout = layout
        self._pushed = PushedShards(folder)

    def read_claim(self) -> Claim | None:
        """Return who claimed the folder; a damaged claim counts as none."""
        try:
            return codec.read_record(Claim, self.root / "claim.json")
        except RecordError:
            return None

    def write_claim(self, claim: Claim) -> None:
        """Claim shard names, before the first of them is written."""
        make_folder(self.root)
        codec.write_record(self.root / "claim.json", claim)

    def finished(self, name: str, fingerprint: str) -> PackedShard | None:
        """Return the record of shard `name` if it was made of the same inputs and its file is there, else None.

        A file that was sent to the Hub and deleted counts as there.
        """
        try:
            head = read_index_head(self._path(name))
            record = codec.loads(PackedShard, head.metadata.get(_RECORD_KEY, ""), where=str(self._path(name)))
        except DataError:  # a record cut by a power loss: the shard is made again
            return None
        return record if record.fingerprint == fingerprint and self._is_there(name, record.entry) else None

    def keep(self, name: str, record: PackedShard, rows: Sequence[IndexRow]) -> None:
        """Write down a finished shard, durably; its file has its name already."""
        metadata = {_RECORD_KEY: codec.dumps(record)}
        schema = index_schema(self._layout.layers, metadata, is_coded=self._layout.is_coded)
        with staged(self._path(name)) as out:
            write_index(out, [index_table(rows, schema)], schema)

    def forget(self, name: str) -> None:
        """Remove the record of a shard that is about to be made again or is no longer wanted."""
        self._path(name).unlink(missing_ok=True)
        self._pushed.forget(name)

    def tables(self, names: Iterable[str]) -> Iterator[pa.Table]:
        """Yield the index rows of finished shards."""
        for name in names:
            yield read_index_table(self._path(name))

    def _is_there(self, name: str, entry: ShardEntry | None) -> bool:
        size_bytes = _size_of(self._folder.shard(name))
        if entry is None or size_bytes is not None:
            return size_bytes == (entry.size_bytes if entry else None)
        return self._pushed.only_remote(entry) is not None

    def _path(self, name: str) -> Path:
        return self.root / f"{PurePosixPath(name).stem}.parquet"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold a dataset folder for one process; the kernel lets go of it however the process ends.

    Raises:
        UsageError: another process holds it.
        StorageError: the folder can't be made, written or locked.
    """
    try:
        make_folder(root)
        lock = (root / LOCK_FILENAME).open("wb")
    except OSError as fault:
        raise StorageError(f"the dataset folder {root} can't be written: {fault.strerror}") from None
    with lock:
        if not take_lock(lock.fileno(), root):
            raise UsageError(f"another eaglehs is packing into {root}", mend="Wait for it, or give another --out")
        yield


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
