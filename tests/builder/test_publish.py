"""A dataset goes to the Hub once, shows when whole, and stays right over changes; all by requests to a real server."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder.hub_client import HubClient, RemoteFile
from eaglehs.builder.index_store import read_index
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.pack_state import locked
from eaglehs.builder.publish import ChangedFileError, Publication, RemoteMismatchError
from eaglehs.builder.publish_card import CardError, MissingLicenseError, set_license
from eaglehs.builder.publish_files import MAX_FILE_BYTES, LocalFile, UnpublishableError, check_limits
from eaglehs.builder.publish_lock import publishing
from eaglehs.builder.publish_plan import NoRightsError, PublishSettings, UnsoundDatasetError, plan_facts
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.errors import StorageError, UsageError
from eaglehs.schemas.manifest import DatasetFolder
from eaglehs.schemas.progress import Silent

from tests.factories.datasets import SyntheticDataset
from tests.factories.locks import lock_like_nfs
from tests.factories.published import (
    BATCHED,
    READER,
    REPO,
    STRANGER,
    TOKENS,
    Pusher,
    assert_not_visible,
    assert_whole,
    by_lfs,
    make_publishable,
)
from tests.fakes.hub import HubServer, start_hub


@pytest.fixture(autouse=True)
def lfs():
    with by_lfs():
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> SyntheticDataset:
    return make_publishable(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def dataset(original: SyntheticDataset, tmp_path: Path) -> SyntheticDataset:
    shutil.copytree(original.root, tmp_path / "dataset")
    return SyntheticDataset(folder=DatasetFolder(tmp_path / "dataset"), run=original.run)


@pytest.fixture
def hub(tmp_path: Path):
    hub = start_hub(tmp_path / "hub", TOKENS)
    yield hub
    hub.stop()


@pytest.fixture
def pusher(hub: HubServer, dataset: SyntheticDataset) -> Pusher:
    return Pusher(hub, dataset.root)


def test_the_whole_dataset_is_there_and_the_revision_is_that_of_the_branch(pusher, hub, dataset):
    result = pusher.push()
    assert_whole(hub, dataset)
    assert (result.revision, result.num_sent) == (hub.refs(REPO)["main"], result.num_files)
    assert set(hub.refs(REPO)) == {"main"}
    for name in ("README.md", "manifest.json", "_index/samples.parquet"):
        blob = hub.state.root / "blobs" / hub.files(REPO)[name]["sha256"]
        assert blob.read_bytes() == (dataset.root / name).read_bytes()


def test_each_shard_is_sent_once_and_one_commit_makes_all_visible(pusher, hub, dataset):
    pusher.push()
    puts = hub.finished_puts()
    assert sorted(puts) == sorted(set(puts))
    assert sum(seen["path"].endswith("/commit/main") for seen in hub.log) == 1
    assert sum(seen["path"].endswith("/commit/eaglehs-upload-main") for seen in hub.log) == 3  # card, two batches


def test_a_second_push_sends_nothing_and_commits_nothing(pusher, hub):
    first = pusher.push()
    hub.log.clear()
    second = pusher.push()
    assert (second.is_unchanged, second.revision, second.sent_bytes) == (True, first.revision, 0)
    assert not [seen for seen in hub.log if seen["method"] in ("PUT", "DELETE") or "/commit/" in seen["path"]]


def test_names_that_begin_with_a_dot_stay_at_home(pusher, hub, dataset):
    (dataset.root / "_index" / ".pack").mkdir()
    (dataset.root / "_index" / ".pack" / "claim.json").write_text("{}")
    (dataset.root / ".lock").write_text("")
    (dataset.root / "plots").mkdir()
    (dataset.root / "plots" / "lengths.png").write_bytes(b"\x89PNG\0")
    pusher.push()
    assert not [path for path in hub.files(REPO) if "/." in path or path in (".lock", ".push.lock")]
    assert "plots/lengths.png" in hub.files(REPO)


def test_a_shard_under_another_name_is_not_sent_again(pusher, hub, dataset):
    pusher.push()
    kept = hub.state.load("datasets", REPO)
    files = kept["commits"][kept["refs"]["main"]]["files"]
    files["data/old-name.tar"] = files.pop("data/train-00002.tar")
    hub.state.save("datasets", REPO, kept)
    hub.log.clear()
    plan = pusher.plan()
    assert (len(plan.sends), len(plan.copies), plan.stale) == (0, 1, ("data/old-name.tar",))
    pusher.push()
    assert_whole(hub, dataset)
    assert not hub.finished_puts()


def test_another_layout_takes_the_old_shards_away_in_the_same_commit(pusher, hub, dataset, tmp_path):
    pusher.push()
    before = hub.refs(REPO)["main"]
    other = tmp_path / "other"
    pack_run(dataset.run.root, other, PackSettings(shard_size_bytes=100_000), Silent())
    write_card(other)
    set_license(other / "README.md", "other")
    again = Pusher(hub, other)
    result = again.push()
    assert result.removed == tuple(f"data/train-0000{n}.tar" for n in range(1, 4))
    assert_whole(hub, SyntheticDataset(folder=DatasetFolder(other), run=dataset.run))
    assert_whole(hub, dataset, branch=before)  # a pinned revision stays as it was
    assert hub.state.load("datasets", REPO)["commits"][result.revision]["parent"] == before


def test_another_branch_shows_the_dataset_and_main_does_not(pusher, hub, dataset):
    settings = replace(BATCHED, branch="v2")
    pusher.push(settings)
    assert_whole(hub, dataset, branch="v2")
    assert_not_visible(hub)


def test_the_plan_tells_all_and_changes_nothing(pusher, hub, dataset):
    settings = PublishSettings(private=True)
    facts = plan_facts(pusher.plan(settings), pusher.client, settings)
    assert (facts.repo, facts.account, facts.is_new, facts.is_private) == (REPO, "alice", True, True)
    assert facts.folders == {".": 2, "_index": 1, "data": 4}
    assert facts.largest_bytes == max(entry.size_bytes for entry in dataset.manifest.shards)
    assert (facts.num_present, facts.num_sent) == (0, 7)
    assert hub.state.load("datasets", REPO) is None


def test_private_makes_a_private_repository_and_refuses_a_public_one(pusher, hub, dataset):
    pusher.push(replace(BATCHED, private=True))
    assert hub.state.load("datasets", REPO)["private"]
    public = replace(pusher, repo="org/public")
    public.push()
    with pytest.raises(UsageError, match="public already"):
        public.push(replace(BATCHED, private=True))


@pytest.mark.parametrize("token", [READER, STRANGER])
@pytest.mark.parametrize("exists", [False, True])
def test_without_rights_nothing_is_sent(pusher, hub, token, exists):
    if exists:
        pusher.push()
        hub.log.clear()
    with pytest.raises(StorageError) as refusal:
        replace(pusher, token=token).push()
    assert isinstance(refusal.value, NoRightsError) or refusal.value.status == 403
    assert not [seen for seen in hub.log if seen["method"] in ("PUT", "DELETE") or seen["path"].endswith("create")]


def break_shard(root: Path) -> None:
    path = root / "data" / "train-00001.tar"
    path.write_bytes(path.read_bytes()[:-512])


def break_header(root: Path) -> None:
    with (root / "data" / "train-00001.tar").open("r+b") as file:
        file.write(b"\xff" * 20)


def break_manifest(root: Path) -> None:
    (root / "manifest.json").write_text("{}")


def cut_yaml(root: Path) -> None:
    (root / "README.md").write_text("---\nlicense: [\n---\n# x\n")


def no_configs(root: Path) -> None:
    (root / "README.md").write_text("---\nlicense: mit\n---\n# x\n")


def other_count(root: Path) -> None:
    card = root / "README.md"
    card.write_text(card.read_text().replace("num_examples: 8", "num_examples: 9"))


def no_license(root: Path) -> None:
    card = root / "README.md"
    card.write_text(card.read_text().replace("license: other\n", ""))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (break_shard, UnsoundDatasetError),
        (break_header, UnsoundDatasetError),
        (break_manifest, UnsoundDatasetError),
        (lambda root: (root / "data" / "train-00003.tar").unlink(), UnsoundDatasetError),
        (lambda root: shutil.copy(root / "data/train-00000.tar", root / "data/train-00009.tar"), UnsoundDatasetError),
        (lambda root: (root / "_index" / "samples.parquet").unlink(), UnsoundDatasetError),
        (lambda root: (root / "load.py").write_text(""), UnsoundDatasetError),
        (lambda root: (root / "README.md").unlink(), CardError),
        (cut_yaml, CardError),
        (no_configs, CardError),
        (other_count, CardError),
        (no_license, MissingLicenseError),
    ],
)
def test_what_is_not_fit_is_refused_before_the_first_request(pusher, hub, dataset, damage, error):
    damage(dataset.root)
    with pytest.raises(error):
        pusher.push()
    assert hub.log == []


def test_a_file_too_large_for_the_hub_is_refused_unread_with_both_numbers(pusher, hub, dataset):
    with (dataset.root / "notes.bin").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(UnpublishableError, match=r"50,000,000,001 bytes.*no file over 50 GB"):
        pusher.push()
    assert hub.log == []


def test_a_folder_with_too_many_files_is_refused_with_both_numbers(tmp_path):
    files = [LocalFile(name=f"data/{n}", path=tmp_path, size_bytes=1, sha256="", is_shard=True) for n in range(10_001)]
    with pytest.raises(UnpublishableError, match=r"10,001 files.*no more than 10,000"):
        check_limits(files)
    check_limits(files[1:])


def test_a_changed_value_is_found_by_deep_before_and_by_its_hash_on_the_way(pusher, hub, dataset):
    path = dataset.root / "data" / "train-00003.tar"
    content = bytearray(path.read_bytes())
    last = list(read_index(dataset.folder.index))[-1].arrays["final"]
    content[last.offset + 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UnsoundDatasetError):
        pusher.push(replace(BATCHED, verify_all=True))
    assert hub.log == []
    with pytest.raises(ChangedFileError, match=r"train-00003.tar has SHA-256"):
        pusher.push()
    assert_not_visible(hub)


def test_another_hash_in_the_hubs_listing_is_an_error_and_a_rerun_mends_it(pusher, hub, dataset):
    hub.state.forged["data/train-00001.tar"] = "e" * 64
    with pytest.raises(RemoteMismatchError, match=r"train-00001.tar has .* hash e{64}"):
        pusher.push()
    assert_not_visible(hub)
    hub.state.forged.clear()
    sent = hub.finished_puts()
    pusher.push()
    assert_whole(hub, dataset)
    assert hub.finished_puts()[: len(sent)] == sent
    assert len(set(hub.finished_puts())) == len(hub.finished_puts())


def test_what_the_branch_lists_at_the_end_is_compared_too(pusher, hub, dataset):
    hub.state.forged["_index/samples.parquet"] = (
        "e" * 64
    )  # goes with the last commit, so nothing has compared it before
    with pytest.raises(RemoteMismatchError, match=r"_index/samples.parquet has .* hash e{64}"):
        pusher.push()
    hub.state.forged.clear()
    assert pusher.push().is_unchanged
    assert set(hub.refs(REPO)) == {"main"}


def test_a_shard_that_the_hub_cut_is_named_with_both_sizes(pusher, hub, dataset, monkeypatch):
    listed, entry = HubClient.files, dataset.manifest.shards[1]

    def cut(client: HubClient, revision: str) -> dict[str, RemoteFile]:
        files = listed(client, revision)
        return files | {
            name: replace(file, size_bytes=file.size_bytes - 1_000)
            for name, file in files.items()
            if name == entry.name
        }

    monkeypatch.setattr(HubClient, "files", cut)
    with pytest.raises(RemoteMismatchError, match=rf"{entry.name} has {entry.size_bytes - 1_000:,} bytes .* expected"):
        pusher.push()
    assert_not_visible(hub)


def test_shards_can_be_sent_one_by_one_as_they_are_finished(pusher, hub, dataset):
    plan = pusher.plan()
    publication = Publication(pusher.client, BATCHED, Silent())
    publication.open(plan)
    for file in plan.sends:
        publication.send([file])
        assert file.name in hub.files(REPO, "eaglehs-upload-main")
        assert_not_visible(hub)
    assert publication.finish(plan) == hub.refs(REPO)["main"]
    assert_whole(hub, dataset)


def test_a_list_of_licenses_is_replaced_whole(dataset):
    card = dataset.folder.card
    rest = card.read_text().removeprefix("---\nlicense: other\n")
    card.write_text(f"---\nlicense:\n- mit\n- other\nlicense_name: acme\n{rest}")
    set_license(card, "cc-by-4.0")
    assert card.read_text() == f"---\nlicense: cc-by-4.0\n{rest}"


def test_two_publishers_of_one_folder_exclude_each_other_and_a_pack_both(dataset):
    with (
        publishing(dataset.root),
        pytest.raises(UsageError, match="another eaglehs is publishing"),
        publishing(dataset.root),
    ):
        pass
    with locked(dataset.root), pytest.raises(UsageError, match="packing"), publishing(dataset.root):
        pass
    with publishing(dataset.root):
        pass


@pytest.mark.parametrize("name", ["/home/alice/tiny", "work/tiny"])
def test_a_manifest_that_tells_where_its_model_lay_is_refused_before_the_hub_is_asked(hub, tmp_path, name):
    dataset = make_publishable(tmp_path / "told", lengths=(4,))
    model = replace(dataset.manifest.model, name=name, revision="local-0123456789abcdef")
    write_record(dataset.folder.manifest, replace(dataset.manifest, model=model))
    with pytest.raises(UnpublishableError, match=f"where its model lay on this machine: {name}.*packed it again"):
        Pusher(hub, dataset.root).plan()
    assert hub.log == []


def test_publishers_exclude_each_other_and_packers_on_nfs_too(dataset, monkeypatch):
    lock_like_nfs(monkeypatch)
    with publishing(dataset.root):
        with pytest.raises(UsageError, match="another eaglehs is publishing"), publishing(dataset.root):
            pass
        with pytest.raises(UsageError, match="another eaglehs is packing"), locked(dataset.root):
            pass
    with locked(dataset.root):
        with publishing(dataset.root, holds_pack_lock=True):
            pass
        with pytest.raises(UsageError, match="another eaglehs is publishing"), publishing(dataset.root):
            pass
