"""Datasets on the fake Hub, and pushes to it."""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from eaglehs.builder.hub_client import HubClient
from eaglehs.builder.hub_retry import HubRetryPolicy
from eaglehs.builder.publish import PublishResult, publish
from eaglehs.builder.publish_card import set_license
from eaglehs.builder.publish_plan import PublishPlan, PublishSettings, plan_publish
from eaglehs.schemas.progress import Silent
from huggingface_hub import HfApi, constants

from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import make_readable
from tests.fakes.hub import HubServer

WRITER, READER, STRANGER = "hf_WriterSecret1", "hf_ReaderSecret2", "hf_StrangerSecret3"
TOKENS = (f"{WRITER}:alice:write:org", f"{READER}:bob:read:org", f"{STRANGER}:eve:write")
REPO = "org/states"
BATCHED = PublishSettings(batch_files=2, workers=2)
HASTY = HubRetryPolicy(attempts=3, first_wait_s=0.01, longest_wait_s=0.02)
"""Waits that a test has the time for."""


@dataclass
class Pusher:
    """Pushes one folder to one Hub, in this process, by Git-LFS."""

    hub: HubServer
    root: Path
    token: str | bool = WRITER
    repo: str = REPO

    @property
    def client(self) -> HubClient:
        return HubClient(self.repo, api=HfApi(endpoint=self.hub.url, token=self.token), policy=HASTY)

    def plan(self, settings: PublishSettings = BATCHED) -> PublishPlan:
        return plan_publish(self.root, self.client, settings, Silent())

    def push(self, settings: PublishSettings = BATCHED) -> PublishResult:
        return publish(self.plan(settings), self.client, settings, Silent())


def make_publishable(root: Path, **options: object) -> SyntheticDataset:
    """Make a dataset of 8 samples in 4 shards with a card that names a license."""
    dataset = make_readable(root, **options)  # type: ignore[arg-type]
    set_license(dataset.folder.card, "other")
    return dataset


@contextmanager
def by_lfs():
    """Send by Git-LFS: its requests can be counted and broken one by one."""
    was, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = was


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: HubServer, token: str = WRITER) -> None:
    """Let this process have only this Hub: huggingface_hub reads its variables once, when it is imported."""
    monkeypatch.setenv("HF_TOKEN", token)
    known = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
    }
    for name, value in known.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


def hub_environment(hub: HubServer, home: Path, *, xet: bool, token: str = WRITER) -> dict[str, str]:
    """Return the environment of a command that has only this Hub and an empty cache."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "0" if xet else "1",
        "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1",
        "HF_XET_CLIENT_RETRY_BASE_DELAY": "50ms",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }


def assert_whole(hub: HubServer, dataset: SyntheticDataset, branch: str = "main", repo: str = REPO) -> None:
    """Hold what a branch shows against the manifest: all shards with their hashes, nothing else under data/."""
    there = {path: file["sha256"] for path, file in hub.files(repo, branch).items() if path.startswith("data/")}
    assert there == {entry.name: entry.sha256 for entry in dataset.manifest.shards}
    assert {"README.md", "manifest.json", "_index/samples.parquet"} <= set(hub.files(repo, branch))


def assert_not_visible(hub: HubServer, repo: str = REPO) -> None:
    """Hold that `main` shows nothing of a dataset whose push has not ended."""
    kept = hub.state.load("datasets", repo)
    assert kept is None or set(hub.files(repo)) == {".gitattributes"}
