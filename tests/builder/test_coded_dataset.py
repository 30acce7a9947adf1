"""A dataset with a codec under every reader: the same bits as plain."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from datasets import Value, load_dataset
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from eaglehs.builder import HiddenStates
from eaglehs.builder.catalog import open_catalog
from eaglehs.builder.collate import collate
from eaglehs.builder.decode import column_of, decode
from eaglehs.builder.inspect import inspect_path, inspect_sample
from eaglehs.builder.planes import CodedBlockError
from eaglehs.builder.preview import PreviewSettings, write_preview
from eaglehs.builder.sample_map import SampleRows, map_sample
from eaglehs.builder.shard_head import layout_of
from eaglehs.builder.statistics import MeasureSettings, measure_dataset
from eaglehs.builder.stored_samples import open_stored
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.planes import read_head
from eaglehs.schemas.states import Codec, array_specs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from webdataset import autodecode

from tests.builder.test_reader_modes import assert_cropped, inside_worker, kept, open_in
from tests.factories.bits import bits_of
from tests.factories.coded import code_dataset, make_coded, make_good
from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.readable import assert_all_samples
from tests.fakes.range_server import RangeServer, start_range_server

MODES = ("auto", "arena", "verified", "http", "cached")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_coded(tmp_path_factory.mktemp("coded"))


@pytest.fixture(scope="module")
def finite(tmp_path_factory: pytest.TempPathFactory) -> tuple[SyntheticDataset, SyntheticDataset]:
    """The same states, as `pack` takes them, plain and coded."""
    plain = make_dataset(tmp_path_factory.mktemp("plain"), lengths=(5, 12, 300), hidden_size=64)
    coded = make_dataset(tmp_path_factory.mktemp("coded"), lengths=(5, 12, 300), hidden_size=64)
    return plain, code_dataset(coded)


@pytest.fixture(scope="module")
def server(dataset: SyntheticDataset) -> Iterator[RangeServer]:
    server = start_range_server(dataset.root)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


# ------------------------------------------------------------------ readers


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(MODES),
    num_workers=st.integers(0, 2),
    world_size=st.integers(1, 2),
    seed=st.none() | st.just(4),
    max_tokens=st.none() | st.integers(1, 40),
    states=st.none() | st.sampled_from([[], ["final"], ["layer_2", "layer_9"]]),
)
def test_any_split_of_a_stream_in_any_mode_gives_each_sample_once(
    dataset, server, cache, mode, num_workers, world_size, seed, max_tokens, states
):
    options = {"shuffle_seed": seed, "max_tokens": max_tokens, "states": states, "world_size": world_size}
    samples = []
    for rank in range(world_size):
        part = open_in(mode, dataset.root, server.url, cache, rank=rank, **options)
        if num_workers == 0:
            samples += [kept(sample) for sample in part]
        for worker in range(num_workers):
            with inside_worker(worker, num_workers):
                samples += list(part)
    assert sorted(sample["key"] for sample in samples) == sorted(dataset.keys)
    for sample in samples:
        assert_cropped(sample, dataset, states, max_tokens)


def test_a_crop_reads_no_blocks_behind_it(tmp_path: Path):
    dataset = make_good(tmp_path, lengths=[400], hidden_size=64, shard_size_bytes=10**7, block_bytes=4096)
    [row] = open_catalog(dataset.root).rows
    place = row.arrays["final"]
    with dataset.shards[0].open("r+b") as shard:  # whatever is behind the first three blocks is lost
        shard.seek(place.offset)
        head = read_head(shard.read(4096), where="x")
        fourth = list(head.placed())[3]
        shard.seek(place.offset + fourth.offset)
        shard.write(bytes(place.stored_bytes - fourth.offset))
    rows = 3 * head.block_rows
    [sample] = stream(dataset.root, states=["final"], max_tokens=rows)
    np.testing.assert_array_equal(bits_of(sample["final"]), dataset.bits("p0")["final"][:rows])
    with pytest.raises(CodedBlockError, match=r"block 3 \(rows"):
        list(stream(dataset.root, states=["final"], max_tokens=rows + 1))


def test_coded_states_can_not_be_mapped(dataset: SyntheticDataset):
    with pytest.raises(UsageError, match="codec planes-zstd are decoded, and so can't be mapped"):
        stream(dataset.root, staging="map")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stock_datasets_gives_bytes_that_decode_makes_tensors_of(dataset: SyntheticDataset, num_workers: int):
    rows = load_dataset(str(dataset.root), split="train", streaming=True)
    assert rows.features["final.bf16.planes"] == Value("binary")
    loader = DataLoader(rows, batch_size=None, num_workers=num_workers)
    assert_all_samples([decode(row) for row in loader], dataset)
    batches = list(DataLoader(rows, batch_size=3, num_workers=num_workers, collate_fn=collate))
    assert sorted(key for batch in batches for key in batch["key"]) == sorted(dataset.keys)


def test_stock_datasets_gives_the_same_from_arrow_without_streaming_and_without_a_card(tmp_path: Path):
    dataset = make_coded(tmp_path)
    rows = load_dataset(str(dataset.root), split="train", streaming=True).with_format("arrow")
    assert_all_samples([decode(table.to_pylist()[0]) for table in rows], dataset)
    stored = load_dataset(str(dataset.root), split="train", cache_dir=str(tmp_path / "cache"))
    assert_all_samples([decode(row) for row in stored], dataset)
    dataset.folder.card.unlink()
    guessed = load_dataset(str(dataset.root), split="train", streaming=True)
    assert_all_samples([decode(row) for row in guessed], dataset)


@pytest.mark.parametrize("is_decoded", [True, False])
def test_webdataset_leaves_the_members_as_they_are(dataset: SyntheticDataset, is_decoded: bool):
    samples = webdataset.WebDataset([str(shard) for shard in dataset.shards], shardshuffle=False, empty_check=False)
    assert_all_samples([decode(row) for row in (samples.decode() if is_decoded else samples)], dataset)


@pytest.mark.parametrize("states", [None, ["layer_5"]])
@pytest.mark.parametrize("is_remote", [True, False])
def test_the_builder_class_gives_tensors(dataset: SyntheticDataset, states, is_remote: bool):
    if is_remote:
        memory = fsspec.filesystem("memory")
        for shard in dataset.shards:
            memory.pipe(f"/coded/{shard.name}", shard.read_bytes())
    shards = "memory://coded/train-*.tar" if is_remote else f"{dataset.root}/data/train-*.tar"
    rows = HiddenStates(data_files={"train": [shards]}, states=states, max_tokens=20).as_streaming_dataset(
        split="train"
    )
    found = list(rows)
    assert [row["key"] for row in found] == dataset.keys
    for row in found:
        assert_cropped(row, dataset, states, 20)


def test_a_lost_index_is_made_up_from_the_heads_of_the_members(tmp_path: Path):
    dataset = make_coded(tmp_path)
    rows = open_catalog(dataset.root).rows
    dataset.folder.index.unlink()
    with pytest.warns(UserWarning, match="headers of 4 shards"):
        assert open_catalog(dataset.root).rows == rows
    assert layout_of(dataset.shards[0]).codec is Codec.PLANES_ZSTD


# ------------------------------------------------------------------ what else reads states


def test_statistics_are_those_of_the_plain_states(finite):
    plain, coded = (measure_dataset(one.root, MeasureSettings()) for one in finite)
    assert replace(coded.statistics, shards_sha256=plain.statistics.shards_sha256) == plain.statistics
    assert coded.excerpts == plain.excerpts


def test_the_model_check_reads_the_same_rows(finite):
    for max_tokens in (3, 200, 1000):
        found = []
        for dataset in finite:
            with open_stored(dataset.root) as stored:
                found.append(stored.read("p2", max_tokens))
        plain, coded = found
        assert torch.equal(plain.input_ids, coded.input_ids)
        assert torch.equal(plain.last_final, coded.last_final)
        for name, rows_TH in plain.states.items():
            assert torch.equal(rows_TH, coded.states[name])


def test_any_stretch_of_rows_is_that_of_the_whole(dataset: SyntheticDataset):
    row = open_catalog(dataset.root).rows[2]
    names = ("input_ids", "layer_5", "final")
    path = dataset.folder.shard(row.shard)
    whole = map_sample(path, row, names)
    with SampleRows(path, row, names) as sample:
        for start, end in ((0, 33), (7, 8), (30, 33), (0, 1)):
            for name in names:
                found, expected = sample.rows(name, start, end), whole[name][start:end]
                assert found.shape == expected.shape
                assert found.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


def test_preview_and_inspect_read_it(tmp_path: Path):
    dataset = make_coded(tmp_path)
    write_preview(dataset.root, PreviewSettings(num_samples=2))
    overview = inspect_path(dataset.root)
    assert (overview.codec, overview.num_samples) == (Codec.PLANES_ZSTD, 8)
    place = inspect_sample(dataset.root, "p2").arrays["final"]
    assert place.coded is not None
    assert place.coded.width == 16
    assert place.length == 33 * 32


def test_no_stock_reader_takes_a_coded_member_for_something_else():
    video = getattr(WebDataset, "VIDEO_EXTENSIONS", ())
    for spec in array_specs((3, 31, 59), 7168, Codec.PLANES_ZSTD)[2:]:
        extension = spec.member.rsplit(".", 1)[-1]
        for known in (WebDataset.IMAGE_EXTENSIONS, WebDataset.AUDIO_EXTENSIONS, video):
            assert extension not in known
        assert extension not in WebDataset.DECODERS
        assert extension not in autodecode.decoders
        assert extension not in autodecode.IMAGE_EXTENSIONS


def test_names_of_columns_follow_the_codec():
    assert column_of("final", Codec.PLANES_ZSTD) == "final.bf16.planes"
    assert column_of("final") == "final.bf16.npy"
    assert column_of("input_ids", Codec.PLANES_ZSTD) == "input_ids.npy"
