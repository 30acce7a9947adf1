"""A dataset folder to the Hub: shards in batches that last, and one commit that makes the whole of it visible.

    1. the collecting branch `eaglehs-upload-<branch>`: the card first, so that the Hub judges it before any shard, then
       the missing shards, a commit a batch                                              Publication.send
    2. one commit on the branch itself: all shards by reference (nothing is sent twice), card, manifest and index; files
       of an earlier layout go                                                           Publication.finish
    3. the branch is listed and compared with what was to be there; the collecting branch goes

A card that says "not whole yet" would not do: without a `configs` entry `load_dataset` takes every tar that it finds.
So readers of the branch see the dataset as it was, or the new one whole. A stopped push goes on where it was: what
counts is what the Hub lists by SHA-256, nothing is kept locally.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from huggingface_hub import CommitOperationAdd

from ..schemas.counts import counted
from ..schemas.errors import DataError, StorageError
from ..schemas.manifest import DatasetFolder
from ..schemas.progress import Progress
from .hub_client import Change, CopySource, HubClient, RemoteFile
from .hub_errors import HubConflictError
from .publish_files import LocalFile
from .publish_plan import Found, PublishPlan, PublishSettings, stale_files
from .pushed_shards import PushedShards
from .side_by_side import side_by_side

_SHOWN = 5


class ChangedFileError(DataError):
    """A file is not what the manifest says, or was changed while it was sent."""


class RemoteMismatchError(StorageError):
    """What the Hub lists after the push is not what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """What a push has done."""

    repo: str
    branch: str
    revision: str
    """The commit to pin: it will always be this dataset."""

    is_unchanged: bool
    num_files: int
    size_bytes: int
    num_sent: int
    sent_bytes: int
    """Of files that were sent now."""

    removed: tuple[str, ...]


def publish(plan: PublishPlan, hub: HubClient, settings: PublishSettings, progress: Progress) -> PublishResult:
    """Carry out a plan; call it under `publishing`. Files in `plan.stale` are removed: ask before.

    Raises:
        ChangedFileError: a file differs from the manifest; nothing of it is visible.
        RemoteMismatchError: the Hub lists something else than was sent.
        HubError: the Hub refused, or failed for longer than one waits; the same call goes on.
    """
    publication = Publication(hub, settings, progress)
    if plan.is_done:
        assert plan.head is not None  # a branch without a commit has no files
        if plan.has_staging:
            hub.drop_branch(settings.staging)
        return _result(plan, hub, settings, plan.head)
    publication.open(plan)
    progress.begin("push", size_bytes=plan.send_bytes)
    publication.send(plan.sends)
    return _result(plan, hub, settings, publication.finish(plan))


class Publication:
    """One push under way. `send` may be called with whatever shards are finished, `finish` once all are there."""

    def __init__(self, hub: HubClient, settings: PublishSettings, progress: Progress) -> None:
        """Nothing is asked or changed yet."""
        self._hub = hub
        self._settings = settings
        self._progress = progress

    def open(self, plan: PublishPlan) -> None:
        """Make what is missing of repository and branches; the card goes to the collecting branch."""
        self.make_places(plan, has_staging=plan.has_staging or not plan.sends)
        if plan.sends:
            self._commit_batch([card for card in plan.files if card.path == DatasetFolder(plan.dataset).card])

    def make_places(self, found: PublishPlan | Found, *, has_staging: bool) -> None:
        """Make what is missing of repository and branches; a push while the dataset grows has no card yet."""
        if found.repository is None:
            self._hub.create(private=self._settings.private)
        if found.head is None and self._settings.branch != "main":
            self._hub.make_branch(self._settings.branch, "main")
        if not has_staging:
            self._hub.make_branch(self._settings.staging, self._settings.branch)

    def send(self, files: Sequence[LocalFile]) -> None:
        """Send shards to the collecting branch; when this returns the Hub has them for good."""
        for batch in _batches(files, self._settings):
            self._commit_batch(batch)

    def finish(self, plan: PublishPlan) -> str:
        """Make the dataset visible in one commit, compare the Hub's listing with it, and return the commit."""
        self._progress.note("making the dataset visible")
        branch = self._settings.branch
        parent = self._unchanged_head(plan)
        copies = [*((source, file.name) for source, file in plan.copies), *self._staged_copies(plan.sends)]
        additions = [self._sent(file, branch) for file in plan.changes]
        change = Change(
            title="Publish the dataset with eaglehs",
            additions=additions,
            copies=copies,
            deletions=plan.stale,
            parent=parent,
        )
        revision = self._hub.commit(branch, change, is_done=lambda: self._visible(plan))
        self._compare(plan, revision)
        self._hub.drop_branch(self._settings.staging)
        return revision

    def _unchanged_head(self, plan: PublishPlan) -> str | None:
        """Return the commit that the branch must be at still; for a new branch, nobody may have filled it meanwhile."""
        if plan.head is not None:
            return plan.head
        state = self._hub.state(self._settings.branch)
        there = self._hub.files(state.head) if state else {}
        if foreign := stale_files(there, plan.files):
            raise HubConflictError(
                f"{self._hub.repo} was empty when the push began and has {foreign[0]} now",
                why="Somebody else publishes there",
                mend="Agree who does; then the same command shows what it would remove",
            )
        return state.head if state else None

    def _commit_batch(self, batch: Sequence[LocalFile]) -> None:
        branch, size = self._settings.staging, sum(file.size_bytes for file in batch)

        def send(file: LocalFile, _: threading.Event) -> CommitOperationAdd:
            return self._sent(file, branch)

        additions = side_by_side(send, batch, threads=self._settings.workers, name="push")
        title = f"{counted(len(batch), 'file')}, {counted(size, 'byte')}"
        self._hub.commit(branch, Change(title=title, additions=additions), is_done=lambda: self._staged(batch))

    def _sent(self, file: LocalFile, branch: str) -> CommitOperationAdd:
        addition = self._hub.send(file.path, file.name, branch)
        found = addition.upload_info.sha256.hex()
        if found != file.sha256:
            raise ChangedFileError(
                f"{file.path} has SHA-256 {found}, expected {file.sha256}",
                why="It was damaged or changed since it was packed, so it was not made visible",
                mend=f"Find the damage with: eaglehs verify {file.path.parent.parent}; then pack again",
            )
        self._progress.advance(size_bytes=file.size_bytes if file.is_shard else 0)
        return addition

    def _staged(self, batch: Sequence[LocalFile]) -> str | None:
        """Return the collecting commit if it has the batch: then only the answer was lost."""
        return self._holds(self._settings.staging, batch)

    def _visible(self, plan: PublishPlan) -> str | None:
        return self._holds(self._settings.branch, plan.files, absent=plan.stale)

    def _holds(self, branch: str, files: Iterable[LocalFile], absent: Iterable[str] = ()) -> str | None:
        state = self._hub.state(branch)
        if state is None:
            return None
        there = self._hub.files(state.head)
        is_there = all(file.is_at(there.get(file.name)) for file in files) and not set(absent) & set(there)
        return state.head if is_there else None

    def _staged_copies(self, sends: Sequence[LocalFile]) -> Iterator[tuple[CopySource, str]]:
        """Yield where each shard lies on the collecting branch, at a commit that can't change."""
        state = self._hub.state(self._settings.staging) if sends else None
        if state is None:
            if sends:
                raise RemoteMismatchError(
                    f"the branch {self._settings.staging} of {self._hub.repo} is gone",
                    why="Another push of the same dataset has ended, or somebody removed it",
                    mend="Run the same command again",
                )
            return
        staged = self._hub.files(state.head)
        _refuse_differences(self._hub.repo, sends, staged)
        for file in sends:
            yield CopySource(revision=state.head, path=file.name), file.name

    def _compare(self, plan: PublishPlan, revision: str) -> None:
        there = self._hub.files(revision)
        _refuse_differences(self._hub.repo, plan.files, there)
        left = [path for path in plan.stale if path in there]
        if left:
            raise RemoteMismatchError(f"{self._hub.repo} still has {left[0]}", mend="Run the same command again")


def _batches(files: Sequence[LocalFile], settings: PublishSettings) -> Iterator[list[LocalFile]]:
    batch: list[LocalFile] = []
    size = 0
    for file in files:
        if batch and (len(batch) == settings.batch_files or size + file.size_bytes > settings.batch_bytes):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size_bytes
    if batch:
        yield batch


def _refuse_differences(repo: str, files: Iterable[LocalFile], there: dict[str, RemoteFile]) -> None:
    wrong = [file for file in files if not file.is_at(there.get(file.name))]
    if not wrong:
        return
    shown = "; ".join(_difference(file, there.get(file.name)) for file in wrong[:_SHOWN])
    raise RemoteMismatchError(
        f"{repo} does not have what was sent: {counted(len(wrong), 'file differs', 'files differ')}: {shown}",
        mend="Run the same command again: it sends what is wrong or missing",
    )


def _difference(file: LocalFile, remote: RemoteFile | None) -> str:
    if remote is None:
        return f"{file.name} is missing"
    return (
        f"{file.name} has {counted(remote.size_bytes, 'byte')} and hash {remote.sha256 or remote.git_oid}, "
        f"expected {file.size_bytes:,} and {file.sha256}"
    )


def _result(plan: PublishPlan, hub: HubClient, settings: PublishSettings, revision: str) -> PublishResult:
    PushedShards(DatasetFolder(plan.dataset)).note_published(hub.repo, revision)
    sent = (*plan.sends, *plan.changes)
    return PublishResult(
        repo=hub.repo,
        branch=settings.branch,
        revision=revision,
        is_unchanged=plan.is_done,
        num_files=len(plan.files),
        size_bytes=sum(file.size_bytes for file in plan.files),
        num_sent=len(sent),
        sent_bytes=sum(file.size_bytes for file in sent),
        removed=plan.stale,
    )
