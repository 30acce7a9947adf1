"""Which shards of a dataset folder are on the Hub alone: sent while the run went on, confirmed there, deleted here.

    dataset/_index/.pack/<shard>.pushed.json   where the file is, by SHA-256; written before the local file goes
    dataset/_index/.pack/published.json        the commit that shows the whole dataset, once there is one

The shard's record in `.pack` stays, so the run still knows its samples as finished and the dataset's index has them.
A note counts only while the local file is not there. Whoever wants such a shard here says so by `ShardsOnHubError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from ..schemas.atomic import sync_folder
from ..schemas.codec import read_record, write_record
from ..schemas.counts import counted
from ..schemas.errors import RecordError, UsageError
from ..schemas.manifest import DatasetFolder, ShardEntry
from ..schemas.sizes import format_size
from .hub_address import HubAddress


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDataset:
    """Where the whole dataset can be seen."""

    KIND: ClassVar[str] = "eaglehs.published_dataset"
    VERSION: ClassVar[int] = 1

    repo: str
    revision: str
    """A commit, so that it is this dataset for good."""


class ShardsOnHubError(UsageError):
    """Shards that are wanted here are on the Hub alone."""


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

    def address(self, repo: str) -> HubAddress | None:
        """Return where the whole dataset is to be read, if its push to `repo` has ended."""
        try:
            published = read_record(PublishedDataset, self._published)
        except RecordError:
            return None
        return HubAddress(repo=repo, revision=published.revision) if published.repo == repo else None

    def note_published(self, repo: str, revision: str) -> None:
        """Keep the commit that shows the dataset; a folder that has all its shards needs no such note.

        Raises:
            OSError: the folder can't be written.
        """
        if any(self._notes.glob("*.pushed.json")):
            write_record(self._published, PublishedDataset(repo=repo, revision=revision))

    def place(self, note: PushedShard) -> str:
        """Return where a shard is: the address of the whole dataset, or the repository alone until it shows that."""
        return f"{self.address(note.repo) or note.repo}: {note.name}"

    def told(self, remote: Sequence[PushedShard]) -> str:
        """Say in a few words where shards are that are on the Hub alone."""
        more = f" and {counted(len(remote) - 1, 'more shard')}" if len(remote) > 1 else ""
        return f"{self.place(remote[0])}{more}, {format_size(sum(note.size_bytes for note in remote))}"

    def error(self, remote: Sequence[PushedShard]) -> ShardsOnHubError:
        """Return the one answer to all who want the shards of `remote` here."""
        root, repo = self._folder.root, remote[0].repo
        address = self.address(repo)
        mend = "The push has not ended: run the same `eaglehs extract --push` again, then it can be read there"
        if address:
            mend = f"Stream, verify or inspect it there: {address}. Or bring them back: hf download {repo} --repo-type "
            mend += f"dataset --revision {address.revision} --include 'data/*' --local-dir {root}"
        return ShardsOnHubError(
            f"{root} lacks shards that are only on the Hub: {self.told(remote)}",
            why="They were sent there and deleted here (extract --delete-pushed)",
            mend=mend,
        )

    def delete_local(self, entry: ShardEntry, repo: str) -> None:
        """Note that the Hub has the shard, durably, and remove the file.

        Raises:
            OSError: the folder can't be written.
        """
        self._published.unlink(missing_ok=True)  # that was the dataset without this shard
        note = PushedShard(repo=repo, name=entry.name, size_bytes=entry.size_bytes, sha256=entry.sha256)
        write_record(self._path(entry.name), note)
        shard = self._folder.shard(entry.name)
        shard.unlink(missing_ok=True)
        sync_folder(shard.parent)

    def forget(self, name: str) -> None:
        """Remove the note of a shard that is made again."""
        self._published.unlink(missing_ok=True)
        self._path(name).unlink(missing_ok=True)

    @property
    def _published(self) -> Path:
        return self._notes / "published.json"

    def _path(self, name: str) -> Path:
        return self._notes / f"{PurePosixPath(name).stem}.pushed.json"
