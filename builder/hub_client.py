"""One dataset repository of the Hub: the few calls that publishing and reading need, of huggingface_hub 1 and 2 alike.

Every call is tried again while the fault may pass (hub_retry) and told as a HubError otherwise (hub_errors). The token
is the one that huggingface_hub finds: HF_TOKEN, else the login.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import is_package_available  # type: ignore[attr-defined] # missing in its list for checkers
from huggingface_hub.utils.tqdm import disable_progress_bars

from ..schemas.progress import Progress, Silent
from .hub_errors import HubPlace, MissingRepositoryError, MissingRevisionError
from .hub_retry import HubRetryPolicy, Retrier

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

_KIND = "dataset"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a commit, as the Hub lists it."""

    size_bytes: int
    sha256: str | None
    """None for a small text file, which git keeps itself."""

    git_oid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Whose token it is."""

    name: str
    organizations: tuple[str, ...]
    role: str
    """`write`, `read`, `fineGrained`, or empty where the Hub does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryState:
    """A repository that is there."""

    head: str
    """The commit that the revision stands for."""

    is_private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """A file that the Hub has already, at a commit."""

    revision: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one commit does."""

    title: str
    additions: Sequence[CommitOperationAdd] = ()
    copies: Sequence[tuple[CopySource, str]] = ()
    deletions: Sequence[str] = ()
    parent: str | None = None
    """Refuse if the branch is no longer at this commit."""

    def operations(self) -> list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete]:
        """Return it as huggingface_hub takes it."""
        copies = [
            CommitOperationCopy(src_path_in_repo=source.path, path_in_repo=path, src_revision=source.revision)
            for source, path in self.copies
        ]
        return [*self.additions, *copies, *(CommitOperationDelete(path_in_repo=path) for path in self.deletions)]


class HubClient:
    """Calls about one repository; used by several threads."""

    def __init__(
        self,
        repo: str,
        *,
        progress: Progress | None = None,
        policy: HubRetryPolicy | None = None,
        api: HfApi | None = None,
    ) -> None:
        """`progress` hears of waits; `api` carries another endpoint or token than the environment's."""
        disable_progress_bars()  # its bars would run through ours
        is_package_available("hf_xet")  # 2.0.0 tells threads "no" while one of them finds out; files then go by LFS
        self.repo = repo
        self.api = api or HfApi()
        self.place = HubPlace(repo=repo, endpoint=self.api.endpoint)
        self._retrier = Retrier(place=self.place, policy=policy or HubRetryPolicy(), progress=progress or Silent())

    def account(self) -> Account:
        """Return whose token is used."""
        found = self._retrier.call("asking whose token this is", self.api.whoami)
        token = found.get("auth", {}).get("accessToken") or {}
        organizations = tuple(org["name"] for org in found.get("orgs", []))
        return Account(name=found["name"], organizations=organizations, role=str(token.get("role", "")))

    def check_write(self) -> None:
        """Raise HubError unless the token may write here."""
        self._retrier.call(
            "asking for write rights", lambda: self.api.auth_check(self.repo, repo_type=_KIND, write=True)
        )

    def state(self, revision: str | None = None) -> RepositoryState | None:
        """Return the repository at a revision; None where either is missing, or not to be seen."""
        try:
            info: DatasetInfo = self._retrier.call(
                f"looking up {self.repo}", lambda: self.api.dataset_info(self.repo, revision=revision)
            )
        except (MissingRepositoryError, MissingRevisionError):
            return None
        return RepositoryState(head=str(info.sha), is_private=bool(info.private))

    def resolve(self, revision: str | None) -> str:
        """Return the commit that a branch or tag stands for now; None is `main`."""
        info: DatasetInfo = self._retrier.call(
            f"looking up {self.repo}" + (f" at {revision}" if revision else ""),
            lambda: self.api.dataset_info(self.repo, revision=revision),
        )
        return str(info.sha)

    def create(self, *, private: bool) -> None:
        """Make the repository, unless it is there."""
        self._retrier.call(
            f"making {self.repo}",
            lambda: self.api.create_repo(self.repo, repo_type=_KIND, private=private, exist_ok=True),
        )

    def make_branch(self, branch: str, start: str) -> None:
        """Make a branch at commit or branch `start`, unless it is there."""
        self._retrier.call(
            f"making branch {branch}",
            lambda: self.api.create_branch(self.repo, branch=branch, revision=start, repo_type=_KIND, exist_ok=True),
        )

    def drop_branch(self, branch: str) -> None:
        """Remove a branch; that it is gone already is no fault."""
        with contextlib.suppress(MissingRevisionError):
            self._retrier.call(
                f"removing branch {branch}",
                lambda: self.api.delete_branch(self.repo, branch=branch, repo_type=_KIND),
            )

    def files(self, revision: str) -> dict[str, RemoteFile]:
        """Return path -> file of a revision."""

        def listed() -> dict[str, RemoteFile]:
            tree = self.api.list_repo_tree(self.repo, recursive=True, revision=revision, repo_type=_KIND)
            return {item.path: _remote_file(item) for item in tree if isinstance(item, RepoFile)}

        return self._retrier.call(f"listing {self.repo}", listed)

    def send(self, path: Path, name: str, revision: str) -> CommitOperationAdd:
        """Send a file's content, unless the Hub has it, and return what a commit needs to name it."""

        def sent() -> CommitOperationAdd:
            addition = CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path))
            self.api.preupload_lfs_files(
                self.repo, [addition], repo_type=_KIND, revision=revision, num_threads=1, free_memory=False
            )
            return addition

        return self._retrier.call(f"sending {name}", sent)

    def commit(self, branch: str, change: Change, is_done: Callable[[], str | None] | None = None) -> str:
        """Commit to a branch and return the new commit; `is_done` finds the one of a request whose answer was lost."""

        def committed() -> str:
            info = self.api.create_commit(
                self.repo,
                change.operations(),
                commit_message=change.title,
                repo_type=_KIND,
                revision=branch,
                parent_commit=change.parent,
            )
            return str(info.oid)

        return self._retrier.call(f"committing to {branch} of {self.repo}", committed, is_done)

    def fetch(self, name: str, revision: str) -> Path:
        """Return a local copy of a file, from the cache of huggingface_hub if it is there."""
        return Path(
            self._retrier.call(
                f"fetching {name}",
                lambda: self.api.hf_hub_download(self.repo, name, repo_type=_KIND, revision=revision),
            )
        )

    def sha256_of(self, name: str, revision: str, took: Callable[[int], None]) -> str:
        """Read a whole file over the network, keep nothing of it, and return its SHA-256; `took` hears of its bytes."""

        def hashed() -> str:
            digest = hashlib.sha256()
            for piece in self._pieces(name, revision):
                digest.update(piece)
                took(len(piece))
            return digest.hexdigest()

        return self._retrier.call(f"reading {name}", hashed)

    def _pieces(self, name: str, revision: str) -> Iterator[bytes]:
        system = huggingface_hub.HfFileSystem(endpoint=self.api.endpoint, token=self.api.token)
        with system.open(f"datasets/{self.repo}@{revision}/{name}", "rb", block_size=0) as file:
            while piece := file.read(_READ_BYTES):
                yield piece


def _remote_file(item: RepoFile) -> RemoteFile:
    return RemoteFile(size_bytes=item.size, sha256=item.lfs.sha256 if item.lfs else None, git_oid=item.blob_id)
