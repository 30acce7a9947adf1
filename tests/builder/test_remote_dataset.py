"""Remote datasets: the same samples as local ones, of each no byte more than is wanted, through faults."""

import shutil
import threading
import time
from functools import partial
from pathlib import Path

import fsspec
import pytest
from eaglehs.builder import remote_dataset
from eaglehs.builder.http_ranges import RemoteMissingError, RemoteReadError, RemoteRefusedError
from eaglehs.builder.retries import RetryPolicy
from eaglehs.builder.sample_reads import FlippedBitsError
from eaglehs.builder.shard_source import DatasetMismatchError
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import DataError, RecordError, StorageError, UsageError
from torch.utils.data import DataLoader

from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import assert_all_samples, keys_of, make_readable
from tests.fakes.range_server import RangeServer, start_range_server


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("remote"))


@pytest.fixture
def server(dataset: SyntheticDataset):
    server = start_range_server(dataset.root)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = RetryPolicy(attempts=4, first_wait_s=0.001, longest_wait_s=0.01, timeout_s=10)
    for place in ("HttpPlace", "FsspecPlace"):
        monkeypatch.setattr(remote_dataset, place, partial(getattr(remote_dataset, place), policy=quick))


def serve_copy(dataset: SyntheticDataset, tmp_path: Path) -> RangeServer:
    shutil.copytree(dataset.root, tmp_path / "copy")
    return start_range_server(tmp_path / "copy")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_url_gives_the_samples_of_the_folder_behind_it(dataset, server: RangeServer, num_workers: int):
    samples = list(DataLoader(stream(server.url, shuffle_seed=1), batch_size=None, num_workers=num_workers))
    assert_all_samples(samples, dataset)
    assert keys_of(samples) == keys_of(stream(dataset.root, shuffle_seed=1))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_reads_its_part_of_the_bytes_whatever_the_number_of_shards(tmp_path: Path, world_size: int):
    dataset = make_readable(tmp_path, lengths=[400] * 42, hidden_size=256, shard_size_bytes=5_200_000)
    assert len(dataset.shards) == 7
    server = start_range_server(dataset.root)
    sent = []
    for rank in range(world_size):
        before = server.bytes_sent(r"\.tar")
        assert len(list(stream(server.url, rank=rank, world_size=world_size))) == 42 // world_size
        sent.append(server.bytes_sent(r"\.tar") - before)
    server.stop()
    assert max(sent) <= 1.1 * dataset.manifest.totals.size_bytes / world_size


def test_every_tenth_request_refused_and_others_cut_change_nothing(dataset: SyntheticDataset, server: RangeServer):
    server.every(10, status=429, headers={"Retry-After": "0"})
    server.every(7, cut=20)
    server.every(9, status=503)
    samples = stream(server.url, shuffle_seed=1, connections=4)
    for epoch in range(3):
        samples.set_epoch(epoch)
        assert_all_samples(list(samples), dataset)


def test_a_state_of_the_folder_is_one_of_the_url(dataset: SyntheticDataset, server: RangeServer):
    local = stream(dataset.root, shuffle_seed=1)
    iterator = iter(local)
    begun = [next(iterator)["key"] for _ in range(3)]
    remote = stream(server.url, shuffle_seed=1)
    remote.load_state_dict(local.state_dict())
    assert begun + keys_of(remote) == keys_of(stream(dataset.root, shuffle_seed=1))


def test_opening_reads_manifest_and_index_alone(server: RangeServer):
    stream(server.url)
    assert [seen["path"] for seen in server.log] == ["/manifest.json", "/_index/samples.parquet"]


def test_no_byte_is_asked_for_that_is_not_wanted(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=(900, 901, 902, 903), hidden_size=512, shard_size_bytes=10**8)
    server = start_range_server(dataset.root)
    options = {"states": ["layer_5"], "rank": 1, "world_size": 2, "max_tokens": 100}
    samples = stream(server.url, **options)
    num_tokens = sum(len(sample["layer_5"]) for sample in samples)
    wanted = num_tokens * (4 + 1 + 2 * 512)
    head = 64 * 1024
    assert wanted <= server.bytes_sent("tar") <= wanted + head + len(samples) * 4 * 11_000
    server.stop()


def test_resuming_asks_for_nothing_twice(dataset: SyntheticDataset, server: RangeServer):
    samples = stream(server.url)
    samples.load_state_dict(stream(dataset.root).state_dict(num_consumed=7))
    assert len(list(samples)) == 1
    assert {seen["path"] for seen in server.log if seen["range"]} == {"/data/train-00003.tar"}


def test_a_flipped_bit_on_the_way_is_named_with_array_and_sample(dataset: SyntheticDataset, server: RangeServer):
    row = next(row for row in stream(dataset.root)._catalog.rows if row.key == "p2")
    flip = {"flip": row.arrays["layer_5"].offset + 10}
    server.faults = [(lambda number, path: path.endswith(row.shard), flip)]
    with pytest.raises(FlippedBitsError, match=rf"{row.shard}: layer_5 of sample p2 \(bytes"):
        list(stream(server.url))
    assert len(list(stream(server.url, verify=False))) == 8


def test_samples_before_a_fault_come_first(dataset: SyntheticDataset, tmp_path: Path):
    server = serve_copy(dataset, tmp_path)
    (server.root / "data" / "train-00002.tar").unlink()
    rows = stream(dataset.root)._catalog.rows
    begun = []
    with pytest.raises(RemoteMissingError, match=r"train-00002\.tar: the server answers 404"):
        begun.extend(sample["key"] for sample in stream(server.url))
    assert begun == [row.key for row in rows if row.shard < "data/train-00002"]
    server.stop()


def test_a_cut_shard_is_named_with_both_sizes(dataset: SyntheticDataset, tmp_path: Path):
    server = serve_copy(dataset, tmp_path)
    shard = server.root / "data" / "train-00001.tar"
    shard.write_bytes(shard.read_bytes()[:-1024])
    with pytest.raises(DatasetMismatchError, match=r"train-00001\.tar has [\d,]+ bytes, the manifest says"):
        list(stream(server.url))
    server.stop()


def test_the_index_of_another_dataset_is_refused(dataset: SyntheticDataset, tmp_path: Path):
    other = make_readable(tmp_path / "other", lengths=(5, 6, 7))
    server = serve_copy(dataset, tmp_path)
    shutil.copy(other.folder.index, server.root / "_index" / "samples.parquet")
    with pytest.raises(DatasetMismatchError, match=r"127\.0\.0\.1.*in the index.*in the manifest"):
        stream(server.url)
    server.stop()


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("manifest.json", UsageError, "holds no manifest.json.*answers 404"),
        ("_index/samples.parquet", RecordError, "samples.parquet: is missing.*answers 404"),
    ],
)
def test_a_lost_manifest_or_index_is_named(dataset, tmp_path: Path, path: str, error: type[DataError], message: str):
    server = serve_copy(dataset, tmp_path)
    (server.root / path).unlink()
    with pytest.raises(error, match=message):
        stream(server.url)
    server.stop()


def test_a_damaged_index_is_named_by_its_url(dataset: SyntheticDataset, tmp_path: Path):
    server = serve_copy(dataset, tmp_path)
    (server.root / "_index" / "samples.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(RecordError, match=r"^http://127\.0\.0\.1:\d+/_index/samples\.parquet: can't be read"):
        stream(server.url)
    server.stop()


def test_a_server_that_goes_down_is_an_error_with_shard_and_range(server: RangeServer):
    samples = stream(server.url)
    server.every(1, status=500)
    with pytest.raises(RemoteReadError, match=r"train-00000\.tar, bytes \d+ to \d+: the server answers 500"):
        list(samples)


def test_a_worker_whose_server_goes_down_raises_the_same_error(dataset: SyntheticDataset):
    server = start_range_server(dataset.root)
    samples = stream(server.url)
    server.stop()
    with pytest.raises(RemoteReadError, match=r"train-00000\.tar, bytes \d+ to \d+: ConnectionRefusedError"):
        list(DataLoader(samples, batch_size=None, num_workers=1))


def test_a_server_that_is_down_when_a_dataset_is_opened_is_an_error_with_what_to_do():
    with pytest.raises(RemoteReadError, match=r"x/manifest\.json, the whole file: .*Try again once the server answers"):
        stream("http://127.0.0.1:1/x")


def test_whole_shards_are_kept_in_a_folder_and_read_from_there(dataset, server: RangeServer, tmp_path: Path):
    for _ in range(2):
        assert_all_samples(list(stream(server.url, cache_dir=tmp_path / "cache")), dataset)
    whole = sum(shard.stat().st_size for shard in dataset.shards)
    assert server.bytes_sent("tar") == whole
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(name for name in left if not name.startswith(".")) == [shard.name for shard in dataset.shards]


def test_what_a_killed_process_was_bringing_is_removed(dataset, server: RangeServer, tmp_path: Path):
    samples = stream(server.url, cache_dir=tmp_path)
    folder = tmp_path / samples._catalog.fingerprint / "data"
    folder.mkdir(parents=True)
    (folder / ".train-00001.tar.4711.part").write_bytes(b"half of it")
    (folder / ".train-00009.tar.4711.part").write_bytes(b"of a shard that is not wanted now")
    assert_all_samples(list(samples), dataset)
    assert [path.name for path in folder.glob(".*.part")] == [".train-00009.tar.4711.part"]


def test_a_damaged_shard_is_not_kept(dataset: SyntheticDataset, tmp_path: Path):
    server = start_range_server(dataset.root)
    server.every(1, flip=600)
    with pytest.raises(DatasetMismatchError, match=r"train-00000\.tar has sha256"):
        list(stream(server.url, cache_dir=tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.tar"))
    server.stop()


def test_any_store_that_fsspec_knows_is_read(dataset: SyntheticDataset):
    memory = fsspec.filesystem("memory")
    memory.put(str(dataset.root), "/bucket/set", recursive=True)
    url = "memory://bucket/set"
    assert_all_samples(list(stream(url, shuffle_seed=0)), dataset)
    memory.pipe("/bucket/set/data/train-00001.tar", b"short")
    with pytest.raises(DatasetMismatchError, match=r"train-00001\.tar has 5 bytes, the manifest says"):
        list(stream(url))
    memory.rm("/bucket/set/data/train-00001.tar")
    with pytest.raises(RemoteMissingError, match=r"memory://bucket/set/data/train-00001\.tar"):
        list(stream(url))
    memory.rm("/bucket", recursive=True)
    with pytest.raises(UsageError, match=r"holds no manifest\.json"):
        stream(url)


class ClientError(Exception):
    """As botocore's and gcsfs' errors: no OSError."""


def test_a_store_whose_client_fails_in_its_own_way_is_asked_again(dataset: SyntheticDataset, monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.put(str(dataset.root), "/failing/set", recursive=True)
    samples = stream("memory://failing/set", connections=1, prefetch_bytes=1)
    asked, real = [], memory.cat_file

    def fail(path: str, **options: object) -> bytes:
        asked.append(path)
        if len(asked) % 2:
            raise (ClientError("Could not connect"), OSError("SlowDown"), TimeoutError())[len(asked) % 3]
        return real(path, **options)

    monkeypatch.setattr(memory, "cat_file", fail)
    assert_all_samples(list(samples), dataset)
    monkeypatch.setattr(memory, "cat_file", Failing(ClientError("Could not connect")))
    with pytest.raises(RemoteReadError, match=r"train-00000\.tar, bytes \d+: ClientError: Could not connect"):
        list(samples)
    with pytest.raises(StorageError, match=r"set/manifest\.json can't be read: ClientError: Could not connect"):
        stream("memory://failing/set")
    refusing = Failing(PermissionError("Access Denied"))
    monkeypatch.setattr(memory, "cat_file", refusing)
    with pytest.raises(RemoteRefusedError, match=r"train-00000\.tar: the store refuses it \(Access Denied\)"):
        list(samples)
    assert refusing.count <= 2  # the sample behind it may be asked for, too; a refusal is no reason to try again
    with pytest.raises(RemoteRefusedError, match=r"manifest\.json: the store refuses it"):
        stream("memory://failing/set")


class Failing:
    """A call that always fails."""

    def __init__(self, fault: Exception) -> None:
        self.count, self.fault = 0, fault

    def __call__(self, *_: object, **__: object) -> bytes:
        self.count += 1
        raise self.fault


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("hf://org/name", {}, UsageError, "hf://datasets/org/name"),
        ("hf://datasets/org/name@main", {"revision": "v2"}, UsageError, "another one"),
        ("http://127.0.0.1:1/x", {"revision": "v2"}, UsageError, "not on the Hub"),
        ("http://127.0.0.1:1/x", {}, StorageError, "127.0.0.1:1/x/manifest.json"),
        ("nothing://bucket/x", {}, StorageError, "nothing"),
    ],
)
def test_a_place_that_can_not_be_is_refused(source: str, options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        stream(source, **options)


def test_a_remote_dataset_can_not_be_mapped(server: RangeServer):
    with pytest.raises(UsageError, match="can't be mapped"):
        stream(server.url, staging="map")


def test_leaving_the_loop_early_leaves_no_thread_behind(dataset: SyntheticDataset, server: RangeServer):
    for _ in range(5):
        next(iter(stream(server.url)))
        next(iter(stream(dataset.root)))
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("eaglehs-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)
