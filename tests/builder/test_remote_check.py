"""A dataset on the Hub is checked and looked at without a download; private and gated ones only by who may."""

import json
import threading
from pathlib import Path

import pytest
from eaglehs.builder.hub_address import HubAddress, parse_hub_address
from eaglehs.builder.hub_client import HubClient
from eaglehs.builder.hub_errors import HubError, MissingFileError, MissingRepositoryError, MissingRevisionError
from eaglehs.builder.remote_check import remote_heads, verify_remote
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.progress import Silent
from huggingface_hub import HfApi

from tests.eaglehs.cli import eaglehs
from tests.factories.datasets import SyntheticDataset
from tests.factories.published import (
    BATCHED,
    HASTY,
    REPO,
    STRANGER,
    TOKENS,
    WRITER,
    Pusher,
    by_lfs,
    hub_environment,
    make_publishable,
)
from tests.fakes.hub import HubServer, start_hub

ADDRESS = HubAddress(repo=REPO)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> SyntheticDataset:
    return make_publishable(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def hub(tmp_path: Path, dataset, monkeypatch):
    hub = start_hub(tmp_path / "hub", TOKENS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with by_lfs():
        Pusher(hub, dataset.root).push()
        yield hub
    hub.stop()


def client(hub: HubServer, token: str | bool = WRITER) -> HubClient:
    return HubClient(REPO, api=HfApi(endpoint=hub.url, token=token), policy=HASTY)


def change_files(hub: HubServer, changes: dict[str, dict | None]) -> None:
    """Change how `main` lists files: None removes one, a new name is a copy of the first shard."""
    kept = hub.state.load("datasets", REPO)
    files = kept["commits"][kept["refs"]["main"]]["files"]
    for path, change in changes.items():
        file = files.pop(path, files["data/train-00000.tar"])
        if change is not None:
            files[path] = {**file, **change}
    hub.state.save("datasets", REPO, kept)


def test_a_sound_dataset_is_found_sound_without_reading_a_shard(hub, dataset):
    hub.log.clear()
    report = verify_remote(ADDRESS, client(hub), Silent())
    assert report.is_good
    assert report.path == f"hf://datasets/{REPO}@{hub.refs(REPO)['main']}"
    assert (report.num_samples, report.num_files) == (8, 4)
    assert not [seen for seen in hub.log if ".tar" in seen["path"]]


def test_deep_reads_every_byte_once_through_broken_connections(hub, dataset):
    hub.faults.append({"path": "_cdn", "after_out": 4_000})
    assert verify_remote(ADDRESS, client(hub), Silent(), deep=True).is_good
    shas = [entry.sha256 for entry in dataset.manifest.shards]
    assert {seen["path"].removeprefix("/_cdn/") for seen in hub.log if "_cdn" in seen["path"]} >= set(shas)


def test_deep_finds_bytes_that_are_not_what_the_listing_says(hub, dataset):
    blob = hub.state.root / "blobs" / dataset.manifest.shards[2].sha256
    blob.write_bytes(b"\0" * blob.stat().st_size)
    assert verify_remote(ADDRESS, client(hub), Silent()).is_good
    report = verify_remote(ADDRESS, client(hub), Silent(), deep=True)
    assert [fault.file for fault in report.faults] == ["data/train-00002.tar"]


def test_faults_come_in_the_order_of_the_shards_whichever_is_read_first(hub, dataset, monkeypatch):
    names = [entry.name for entry in dataset.manifest.shards]
    is_read = {name: threading.Event() for name in names}

    def read_backwards(hub_client: HubClient, name: str, *_: object) -> str:
        for later in names[names.index(name) + 1 :]:
            assert is_read[later].wait(60)
        is_read[name].set()
        return "f" * 64

    monkeypatch.setattr(HubClient, "sha256_of", read_backwards)
    report = verify_remote(ADDRESS, client(hub), Silent(), deep=True)
    assert [fault.file for fault in report.faults] == names


def test_a_shard_that_the_hub_has_no_hash_of_is_read(hub, dataset):
    kept = hub.state.load("datasets", REPO)
    file = kept["commits"][kept["refs"]["main"]]["files"]["data/train-00002.tar"]
    del file["pointer"]  # git keeps it itself, as it does with small files that somebody committed by hand
    hub.state.save("datasets", REPO, kept)
    hub.log.clear()
    assert verify_remote(ADDRESS, client(hub), Silent()).is_good
    assert {seen["path"].rpartition("/")[2] for seen in hub.log if ".tar" in seen["path"]} == {"train-00002.tar"}
    blob = hub.state.root / "blobs" / file["sha256"]
    blob.write_bytes(b"\0" * blob.stat().st_size)
    assert [fault.file for fault in verify_remote(ADDRESS, client(hub), Silent()).faults] == ["data/train-00002.tar"]


def test_each_difference_of_the_listing_is_named(hub, dataset):
    shard = "data/train-0000{}.tar".format
    change_files(hub, {shard(1): None, shard(2): {"size": 5}, shard(3): {"sha256": "f" * 64}, shard(9): {}})
    entries = dataset.manifest.shards
    report = verify_remote(ADDRESS, client(hub), Silent())
    assert {fault.file: fault.message.split(";")[0] for fault in report.faults} == {
        shard(1): "is missing on the Hub",
        shard(2): f"has 5 bytes, manifest.json says {entries[2].size_bytes:,}",
        shard(3): f"SHA-256 is {'f' * 64} on the Hub, manifest.json says {entries[3].sha256}",
        shard(9): "is not in manifest.json",
    }


def test_a_pinned_revision_stays_what_it_was(hub, dataset, tmp_path):
    first = hub.refs(REPO)["main"]
    other = make_publishable(tmp_path / "other", lengths=(3, 9))
    Pusher(hub, other.root).push(BATCHED)
    assert verify_remote(parse_hub_address(f"hf://datasets/{REPO}@{first}"), client(hub), Silent()).num_samples == 8
    assert verify_remote(ADDRESS, client(hub), Silent()).num_samples == 2


def test_manifest_and_index_come_for_inspect_and_no_shard_does(hub, dataset):
    folder, pinned = remote_heads(ADDRESS, client(hub))
    assert (folder / "_index" / "samples.parquet").read_bytes() == dataset.folder.index.read_bytes()
    assert pinned.revision == hub.refs(REPO)["main"]


def test_what_is_private_gated_or_not_there_is_told_apart_as_far_as_the_hub_does(hub, dataset):
    with pytest.raises(MissingRevisionError, match="no such branch, tag or commit"):
        verify_remote(HubAddress(repo=REPO, revision="v9"), client(hub), Silent())
    api = HfApi(endpoint=hub.url, token=WRITER)
    api.create_repo("org/empty", repo_type="dataset")
    empty = HubClient("org/empty", api=api, policy=HASTY)
    with pytest.raises(MissingFileError, match="no dataset of eaglehs, or its upload was never finished"):
        verify_remote(HubAddress(repo="org/empty"), empty, Silent())
    api.update_repo_settings(REPO, repo_type="dataset", gated="manual")
    with pytest.raises(HubError, match=r"is gated and this account has no access\. Ask for access at http"):
        verify_remote(ADDRESS, client(hub, STRANGER), Silent())
    assert verify_remote(ADDRESS, client(hub), Silent(), deep=True).is_good
    api.update_repo_settings(REPO, repo_type="dataset", visibility="private")
    for token in (STRANGER, False):
        with pytest.raises(MissingRepositoryError, match="or this account may not see it"):
            verify_remote(ADDRESS, client(hub, token), Silent())
    assert verify_remote(ADDRESS, client(hub), Silent(), deep=True).is_good


@pytest.mark.parametrize(
    "text", ["hf://org/name", "hf://models/org/name", "hf://datasets/name", "hf://datasets/o/n/x", "org/name"]
)
def test_other_addresses_are_refused_with_the_form(text):
    with pytest.raises(UsageError, match=r"hf://datasets/org/name@revision"):
        parse_hub_address(text)


def test_the_commands_show_it(hub, dataset, tmp_path):
    environment = hub_environment(hub, tmp_path / "home", xet=False)
    verified = eaglehs("verify", f"hf://datasets/{REPO}", "--deep", **environment)
    assert (verified.returncode, ": 0 faults" in verified.stdout) == (0, True), verified.stderr
    overview = json.loads(eaglehs("inspect", f"hf://datasets/{REPO}", "--json", **environment).stdout)
    assert (overview["kind"], overview["num_samples"]) == ("dataset", 8)
    assert overview["path"] == f"hf://datasets/{REPO}@{hub.refs(REPO)['main']}"
    missing = eaglehs("verify", "hf://datasets/org/nowhere", **environment)
    assert (missing.returncode, "There is no dataset org/nowhere" in missing.stderr) == (4, True)
    assert WRITER not in missing.stderr + verified.stderr
