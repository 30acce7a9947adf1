"""What a push will do, found out without changing anything: what is sent, copied, kept, removed, and may it be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..schemas.codec import read_record
from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from ..schemas.manifest import DatasetFolder, Manifest
from ..schemas.progress import Progress
from .faults import VerifyReport
from .hub_client import Account, CopySource, HubClient, RemoteFile, RepositoryState
from .hub_errors import HubError
from .publish_card import check_card
from .publish_files import LocalFile, check_told, folder_counts, local_files
from .pushed_shards import PushedShards
from .verify import verify_dataset

OWN_FOLDERS = ("data", "_index", "plots", "preview")
"""Folders of the repository that are the dataset's alone: what is in them and not in the dataset is stale."""

_SHOWN_FAULTS = 3


class UnsoundDatasetError(DataError):
    """The dataset fails `verify`; the report has all faults."""

    def __init__(self, report: VerifyReport) -> None:
        """Name the first faults and how to see all."""
        self.report = report
        shown = "; ".join(str(fault) for fault in report.faults[:_SHOWN_FAULTS])
        super().__init__(
            f"{report.path} has {counted(len(report.faults), 'fault')} and is not sent: {shown}",
            mend=f"See all with: eaglehs verify {report.path}",
        )


class ShardElsewhereError(DataError):
    """A shard that is to be sent was deleted here after it was sent to another place."""


class NoRightsError(HubError):
    """The account may not write where it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """How to publish."""

    branch: str = "main"
    private: bool = False
    """Whether a new repository is private; one that is there must be so already."""

    verify_all: bool = False
    """Check every value first, not only sizes and structure."""

    workers: int = 4
    """Files sent at once."""

    batch_files: int = 50
    batch_bytes: int = 20_000_000_000
    """After how much a commit makes sure of what was sent."""

    @property
    def staging(self) -> str:
        """The branch that collects shards until all are there."""
        return f"eaglehs-upload-{self.branch.replace('/', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """What is to be done, and what was found."""

    dataset: Path
    manifest: Manifest
    account: Account
    repository: RepositoryState | None
    """None where it is still to be made."""

    head: str | None
    """The branch's commit; None where there is no such branch yet."""

    files: tuple[LocalFile, ...]
    sends: tuple[LocalFile, ...]
    """Shards that the Hub does not have."""

    copies: tuple[tuple[CopySource, LocalFile], ...]
    """Shards that it has, on the collecting branch or under another name."""

    changes: tuple[LocalFile, ...]
    """Other files that are new or differ."""

    stale: tuple[str, ...]
    """Files of an earlier layout."""

    has_staging: bool

    @property
    def is_done(self) -> bool:
        """Whether the branch shows this dataset already."""
        return not (self.sends or self.copies or self.changes or self.stale)

    @property
    def send_bytes(self) -> int:
        """Bytes of the shards to send."""
        return sum(file.size_bytes for file in self.sends)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """A plan in plain numbers, for people and for --json."""

    repo: str
    branch: str
    account: str
    is_new: bool
    is_private: bool
    num_files: int
    size_bytes: int
    folders: dict[str, int]
    largest_file: str
    largest_bytes: int
    num_present: int
    num_copied: int
    num_sent: int
    sent_bytes: int
    stale: tuple[str, ...]


def plan_publish(dataset: Path, hub: HubClient, settings: PublishSettings, progress: Progress) -> PublishPlan:
    """Check dataset, card and rights, and compare with what is on the Hub. Changes nothing.

    Raises:
        UnsoundDatasetError, UnpublishableError, CardError, MissingLicenseError, RecordError: the dataset is not fit.
        NoRightsError: the account may not write there.
        HubError: the Hub failed.
    """
    folder = DatasetFolder(dataset)
    if not folder.manifest.is_file():
        raise UsageError(f"{dataset} holds no {folder.manifest.name}", mend="Give the folder that `eaglehs pack` wrote")
    progress.begin("checking")
    report = verify_dataset(dataset, progress, workers=settings.workers, quick=not settings.verify_all)
    if not report.is_good:
        raise UnsoundDatasetError(report)
    manifest = read_record(Manifest, folder.manifest)
    check_told(folder, manifest)
    check_card(folder.card, manifest)
    files = local_files(folder, manifest)
    return _compared(dataset, manifest, files, look_up(hub, settings))


def look_up(hub: HubClient, settings: PublishSettings) -> Found:
    """Return what the Hub has of a dataset, once it is sure that the account may write there.

    Raises:
        UsageError, NoRightsError, HubError: it may not, or the Hub does not answer.
    """
    account = hub.account()
    repository = hub.state()
    _check_rights(hub, account, repository, settings)
    return Found(hub, account, repository, settings)


class Found:
    """What is on the Hub."""

    def __init__(
        self, hub: HubClient, account: Account, repository: RepositoryState | None, settings: PublishSettings
    ) -> None:
        """Asks for all of it."""
        self.account, self.repository = account, repository
        target = hub.state(settings.branch) if repository else None
        staging = hub.state(settings.staging) if repository else None
        self.head = target.head if target else None
        self.there = hub.files(target.head) if target else {}
        self.staged = hub.files(staging.head) if staging else {}
        self.has_staging = staging is not None
        self.sources = _by_sha(self.staged, staging) | _by_sha(self.there, target)


def _by_sha(files: Mapping[str, RemoteFile], state: RepositoryState | None) -> dict[str, CopySource]:
    if state is None:
        return {}
    return {file.sha256: CopySource(revision=state.head, path=path) for path, file in files.items() if file.sha256}


def _compared(dataset: Path, manifest: Manifest, files: tuple[LocalFile, ...], found: Found) -> PublishPlan:
    absent = [file for file in files if not file.is_at(found.there.get(file.name))]
    shards = [file for file in absent if file.is_shard]
    _check_there(dataset, [file for file in shards if file.sha256 not in found.sources])
    return PublishPlan(
        dataset=dataset,
        manifest=manifest,
        account=found.account,
        repository=found.repository,
        head=found.head,
        files=files,
        sends=tuple(file for file in shards if file.sha256 not in found.sources),
        copies=tuple((found.sources[file.sha256], file) for file in shards if file.sha256 in found.sources),
        changes=tuple(file for file in absent if not file.is_shard),
        stale=stale_files(found.there, files),
        has_staging=found.has_staging,
    )


def _check_there(dataset: Path, sends: Iterable[LocalFile]) -> None:
    gone = [file for file in sends if not file.path.exists()]
    if not gone:
        return
    note = PushedShards(DatasetFolder(dataset)).note(gone[0].name)
    raise ShardElsewhereError(
        f"{counted(len(gone), 'shard is', 'shards are')} neither here nor where the dataset is to "
        f"go, such as {gone[0].name}",
        why=f"They were sent to {note.repo} and deleted here (extract --delete-pushed)" if note else "",
        mend=f"Bring them back from there: hf download --repo-type dataset {note.repo} --local-dir {dataset}, with "
        "--revision of the branch that has them"
        if note
        else "Pack again",
    )


def stale_files(there: Iterable[str], files: Sequence[LocalFile]) -> tuple[str, ...]:
    """Return the paths that are there, in folders that are the dataset's, and are not of the dataset."""
    names = {file.name for file in files}
    return tuple(sorted(path for path in there if path.split("/")[0] in OWN_FOLDERS and path not in names))


def plan_facts(plan: PublishPlan, hub: HubClient, settings: PublishSettings) -> PlanFacts:
    """Return the plan in plain numbers."""
    largest = max(plan.files, key=lambda file: file.size_bytes)
    num_absent = len(plan.sends) + len(plan.copies) + len(plan.changes)
    sent = (*plan.sends, *plan.changes)
    return PlanFacts(
        repo=hub.repo,
        branch=settings.branch,
        account=plan.account.name,
        is_new=plan.repository is None,
        is_private=plan.repository.is_private if plan.repository else settings.private,
        num_files=len(plan.files),
        size_bytes=sum(file.size_bytes for file in plan.files),
        folders=folder_counts(plan.files),
        largest_file=largest.name,
        largest_bytes=largest.size_bytes,
        num_present=len(plan.files) - num_absent,
        num_copied=len(plan.copies),
        num_sent=len(sent),
        sent_bytes=sum(file.size_bytes for file in sent),
        stale=plan.stale,
    )


def _check_rights(
    hub: HubClient, account: Account, repository: RepositoryState | None, settings: PublishSettings
) -> None:
    owner = hub.repo.partition("/")[0]
    if repository is not None:
        hub.check_write()
        if settings.private and not repository.is_private:
            raise UsageError(
                f"{hub.repo} is public already, --private makes new repositories only",
                mend=f"Change it at {hub.place.endpoint}/datasets/{hub.repo}/settings, or leave --private out",
            )
    elif account.role == "read":
        raise NoRightsError(
            f"the token of {account.name} may only read",
            mend=f"Make one with write rights at {hub.place.endpoint}/settings/tokens",
        )
    elif owner not in (account.name, *account.organizations):
        places = ", ".join((account.name, *account.organizations))
        raise NoRightsError(
            f"{account.name} may not make {hub.repo}: it may write to {places}",
            mend="Use one of these, or the token of another account",
        )
