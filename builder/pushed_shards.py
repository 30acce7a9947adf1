"""Which shards of a dataset folder are on the Hub alone: sent while the run went on, confirmed there, deleted here.

    dataset/_index/.pack/<shard>.pushed.json   where the file is, by SHA-256; written before the local file goes

The shard's record in `.pack` stays, so the run still knows its samples as finished and the dataset's index has them.
A note counts only while the local file is not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from ..schemas.atomic import sync_folder
from ..schemas.codec import read_record, write_record
from ..schemas.errors import RecordError
from ..schemas.manifest import DatasetFolder, ShardEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedShard:
    """A shard that the Hub has for good."""

    KIND: ClassVar[str] = "eaglehs.pushed_shard"
    VERSION: ClassVar[int] = 1

    repo: str
    name: str
    """Path within the dataset and the repository."""

    size_bytes: int
    sha256: str


class PushedShards:
    """The notes of one dataset folder."""

    def __init__(self, folder: DatasetFolder) -> None:
        """Nothing is read yet."""
        self._folder = folder
        self._notes = folder.index.parent / ".pack"

    def only_remote(self, entry: ShardEntry) -> PushedShard | None:
        """Return where `entry` is, if it is on the Hub and not here; None if the file is here or nobody has it."""
        note = None if self._folder.shard(entry.name).exists() else self.note(entry.name)
        return note if note is not None and (note.size_bytes, note.sha256) == (entry.size_bytes, entry.sha256) else None

    def all_remote(self, entries: Iterable[ShardEntry]) -> list[PushedShard]:
        """Return the notes of those shards that are on the Hub alone."""
        return [note for entry in entries if (note := self.only_remote(entry)) is not None]

    def note(self, name: str) -> PushedShard | None:
        """Return the note of a shard; one that can't be read counts as none: the samples are computed anew."""
        try:
            return read_record(PushedShard, self._path(name))
        except RecordError:
            return None

    def delete_local(self, entry: ShardEntry, repo: str) -> None:
        """Note that the Hub has the shard, durably, and remove the file.

        Raises:
            OSError: the folder can't be written.
        """
        note = PushedShard(repo=repo, name=entry.name, size_bytes=entry.size_bytes, sha256=entry.sha256)
        write_record(self._path(entry.name), note)
        shard = self._folder.shard(entry.name)
        shard.unlink(missing_ok=True)
        sync_folder(shard.parent)

    def forget(self, name: str) -> None:
        """Remove the note of a shard that is made again."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._notes / f"{PurePosixPath(name).stem}.pushed.json"
