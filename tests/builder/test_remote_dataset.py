"""Remote datasets: the same samples as local ones, of each no byte more than is wanted, through faults."""

import shutil
import threading
import time
from functools import partial
from pathlib import Path

import fsspec
import pytest
from eaglehs.builder import remote_dataset
from eaglehs.builder.http_ranges import RemoteMissingError, RemoteReadError
from eaglehs.builder.retries import RetryPolicy
from eaglehs.builder.sample_reads import FlippedBitsError
from eaglehs.builder.shard_source import DatasetMismatchError
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import DataError, RecordError, StorageError, UsageError
from torch.utils.data import DataLoader

from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import assert_all_samples, make_readable
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


def keys_of(samples) -> list[str]:
    return [sample["key"] for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_url_gives_the_samples_of_the_folder_behind_it(dataset, server: RangeServer, num_workers: int):
    samples = list(DataLoader(stream(server.url, shuffle_seed=1), batch_size=None, num_workers=num_workers))
    assert_all_samples(samples, dataset)
    assert keys_of(samples) == keys_of(stream(dataset.root, shuffle_seed=1))


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


def test_shards_in_another_order_are_named_even_where_no_checksum_can_be_held(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[40] * 4)
    first, second = dataset.shards[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    server = start_range_server(dataset.root)
    with pytest.raises(DatasetMismatchError, match=r"train-0000\d\.tar begins with sample p"):
        list(stream(server.url, max_tokens=3))
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


def test_whole_shards_are_kept_in_a_folder_and_read_from_there(dataset, server: RangeServer, tmp_path: Path):
    for _ in range(2):
        assert_all_samples(list(stream(server.url, cache_dir=tmp_path / "cache")), dataset)
    whole = sum(shard.stat().st_size for shard in dataset.shards)
    assert server.bytes_sent("tar") == whole
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(name for name in left if not name.startswith(".")) == [shard.name for shard in dataset.shards]


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
