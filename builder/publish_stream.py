"""Sends the shards of a dataset while others are still being made, for a run that is larger than its disk.

    ShardStream(hub, settings, folder)
      .open()       rights, repository, collecting branch; what the Hub has already      builder/publish_plan
      .add()        a finished shard, from any thread: it waits its turn
      (a thread)    batches to the collecting branch; listed there by SHA-256;           builder/publish
                    noted and deleted here where that is wanted                          builder/pushed_shards
      .close()      the rest is sent, or why it can't be is told

The branch that readers see stays as it is: `publish` makes the whole dataset visible at the end, and finds these shards
on the collecting branch. A Hub that fails stops nothing here: shards wait, and are tried again after a while.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..schemas.counts import counted
from ..schemas.errors import EaglehsError, StorageError, UsageError
from ..schemas.manifest import DatasetFolder, ShardEntry
from ..schemas.progress import Progress
from .hub_client import HubClient
from .publish import Publication
from .publish_files import LocalFile, check_limits, shard_file
from .publish_plan import Found, PublishSettings, look_up
from .pushed_shards import PushedShards


class LostShardError(StorageError):
    """A shard was deleted here because the Hub had it, and the Hub has it no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How to send shards as they come."""

    publish: PublishSettings
    deletes: bool = False
    """Delete a shard here once the Hub lists it by its SHA-256."""

    pause_s: float = 60.0
    """Until a Hub that failed for longer than one waits is tried again."""


class ShardStream:
    """One dataset on its way to the Hub while it grows; the caller holds the folder's locks."""

    def __init__(self, hub: HubClient, settings: StreamSettings, folder: DatasetFolder, progress: Progress) -> None:
        """Nothing is asked or started yet."""
        self._hub = hub
        self._settings = settings
        self._folder = folder
        self._progress = progress
        self._pushed = PushedShards(folder)
        self._publication = Publication(hub, settings.publish, progress)
        self._waiting: list[ShardEntry] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_dropped = False
        self._is_sending = False
        self._thread = threading.Thread(target=self._work, name="push", daemon=True)
        self.fault: EaglehsError | None = None
        """Why the last batch could not be sent; None while all is well."""

    def open(self, whole: Sequence[ShardEntry], names: Collection[str]) -> None:
        """Look up what is there, make what is missing, and begin; `whole` are finished shards, `names` all that may be.

        Raises:
            UsageError: the repository shows another dataset, or shards of this one went elsewhere.
            LostShardError: the Hub has not what it had.
            HubError: no rights, or the Hub does not answer.
        """
        found = look_up(self._hub, self._settings.publish)
        self._check_foreign(found, names)
        remote = self._pushed.all_remote(whole)
        self._check_remote(found, {note.name: note.repo for note in remote}, {note.sha256 for note in remote})
        self._publication.make_places(found, has_staging=found.has_staging)
        self._waiting = [entry for entry in whole if self._pushed.only_remote(entry) is None]
        self._thread.start()

    def add(self, entry: ShardEntry) -> None:
        """Take a finished shard; it is sent soon."""
        with self._changed:
            self._waiting.append(entry)
            self._changed.notify_all()

    @property
    def frees_room(self) -> bool:
        """Whether room on the disk will be freed if one waits: shards are under way, and will be deleted."""
        with self._changed:
            is_under_way = bool(self._waiting) or self._is_sending
            is_well = self.fault is None and self._thread.is_alive()
            return self._settings.deletes and is_under_way and is_well

    def close(self) -> None:
        """Send what waits, once more if the Hub failed before; what can't be sent stays here, and `fault` says why."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def drop(self) -> None:
        """Send no more; a batch under way ends as it will."""
        with self._changed:
            self._is_closing = self._is_dropped = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._send(batch)
            except (EaglehsError, OSError) as fault:
                told = fault if isinstance(fault, EaglehsError) else StorageError(f"a shard can't be sent: {fault}")
                is_last = self._put_back(batch, told)
                self._progress.note(f"push: {told}" + ("" if is_last else f"; again in {self._settings.pause_s:.0f} s"))
                if is_last:
                    return
                self._pause()
            else:
                with self._changed:
                    self._is_sending, self.fault = False, None

    def _next_batch(self) -> list[ShardEntry] | None:
        """Wait for shards and take as many as one commit should have; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if self._is_dropped or not self._waiting:
                return None
            size = self._settings.publish.workers if self._settings.deletes else self._settings.publish.batch_files
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            self._is_sending = True
            return batch

    def _put_back(self, batch: list[ShardEntry], fault: EaglehsError) -> bool:
        """Return whether it is not to be tried again."""
        with self._changed:
            self._waiting = [*batch, *self._waiting]
            self._is_sending, self.fault = False, fault
            return self._is_closing

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, timeout=self._settings.pause_s)

    def _send(self, batch: Sequence[ShardEntry]) -> None:
        files = [shard_file(self._folder, entry) for entry in batch]
        check_limits(files)
        missing = self._missing(files)
        self._publication.send(missing)
        left = self._missing(files) if missing else []
        if left:
            raise StorageError(
                f"{self._hub.repo} does not list {left[0].name} after it was sent",
                why="The Hub lost it, or somebody removed it",
            )
        if self._settings.deletes:
            for entry in batch:
                self._pushed.delete_local(entry, self._hub.repo)
        self._progress.note(
            f"push: {counted(len(batch), 'shard is', 'shards are')} on the Hub, {len(missing):,} of them sent now"
        )

    def _missing(self, files: Sequence[LocalFile]) -> list[LocalFile]:
        """Return those that neither branch lists by their hash."""
        branches = (self._settings.publish.staging, self._settings.publish.branch)
        states = [state for branch in branches if (state := self._hub.state(branch)) is not None]
        there = {file.sha256 for state in states for file in self._hub.files(state.head).values()}
        return [file for file in files if file.sha256 not in there]

    def _check_foreign(self, found: Found, names: Collection[str]) -> None:
        foreign = [path for path in found.there if path.startswith("data/") and path not in names]
        if foreign:
            raise UsageError(
                f"{self._hub.repo} shows another dataset: {foreign[0]} and {len(foreign) - 1} more are not of this one",
                mend="Give a new name, or extract without --push and see what `eaglehs push --dry-run` would remove",
            )

    def _check_remote(self, found: Found, repos: dict[str, str], hashes: set[str]) -> None:
        """See that what was deleted here is still where it was sent."""
        elsewhere = [name for name, repo in repos.items() if repo != self._hub.repo]
        if elsewhere:
            raise UsageError(
                f"{elsewhere[0]} was sent to {repos[elsewhere[0]]} and deleted here",
                mend=f"Go on with --push {repos[elsewhere[0]]}",
            )
        gone = hashes.difference(found.sources)
        if gone:
            raise LostShardError(
                f"{counted(len(gone), 'shard was', 'shards were')} deleted here because {self._hub.repo} had them, and "
                f"it has them no more",
                why=f"The branch {self._settings.publish.staging} was removed, or files of it",
                mend=f"Restore it there. Or remove {self._folder.index.parent}/.pack/*.pushed.json and run the same "
                "command again: these samples are computed anew",
            )
