"""`HiddenStates`: a `datasets.IterableDataset` of bfloat16 tensors, the same bits as every other reader."""

import subprocess
import sys
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from eaglehs.builder import HiddenStates
from eaglehs.builder.collate import collate
from eaglehs.schemas.errors import DataError, UsageError
from torch.utils.data import DataLoader

from tests.factories.bits import bits_of
from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.readable import assert_all_samples, keys_of, make_readable


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("builder"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def open_stream(dataset: SyntheticDataset, **options: object) -> IterableDataset:
    pattern = str(dataset.folder.data / "train-*.tar")
    return HiddenStates(data_files={"train": [pattern]}, **options).as_streaming_dataset(split="train")


def test_samples_come_in_shard_order_bit_for_bit(dataset: SyntheticDataset):
    samples = list(open_stream(dataset))
    assert keys_of(samples) == dataset.keys
    assert_all_samples(samples, dataset)


def test_a_list_of_shards_works_without_manifest_and_index(dataset: SyntheticDataset, tmp_path: Path):
    shards = []
    for shard in dataset.shards:
        shards.append(str(tmp_path / shard.name))
        Path(shards[-1]).write_bytes(shard.read_bytes())
    rows = HiddenStates(data_files={"train": shards}).as_streaming_dataset(split="train")
    assert rows.num_shards == 4
    assert_all_samples(list(rows), dataset)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_gives_each_sample_once(dataset: SyntheticDataset, num_workers: int):
    assert_all_samples(list(DataLoader(open_stream(dataset), batch_size=None, num_workers=num_workers)), dataset)


def test_collate_makes_batches(dataset: SyntheticDataset):
    batches = list(DataLoader(open_stream(dataset), batch_size=3, collate_fn=collate))
    assert [len(batch["key"]) for batch in batches] == [3, 3, 2]
    assert batches[0]["final"].dtype == torch.bfloat16


def test_chosen_states_and_cut_tails(dataset: SyntheticDataset):
    for sample in open_stream(dataset, states=["final"], max_tokens=4):
        expected = dataset.bits(sample["key"])
        assert list(sample) == ["key", "input_ids", "loss_mask", "final"]
        np.testing.assert_array_equal(bits_of(sample["final"]), expected["final"][:4])
        assert sample["input_ids"].tolist() == expected["input_ids"][:4, 0].tolist()


def test_split_by_node_and_map_are_those_of_datasets(dataset: SyntheticDataset):
    parts = [keys_of(split_dataset_by_node(open_stream(dataset), rank, 2)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(dataset.keys)
    lengths = open_stream(dataset).map(lambda sample: {"length": len(sample["input_ids"])})
    assert [row["length"] for row in lengths] == [len(dataset.bits(key)["input_ids"]) for key in dataset.keys]


def test_resume_twice_in_a_row_goes_on_where_the_loop_was(dataset: SyntheticDataset):
    seen, state = [], None
    for _ in range(3):
        rows = open_stream(dataset)
        if state is not None:
            rows.load_state_dict(state)
        for row in rows:
            seen.append(row["key"])
            state = rows.state_dict()
            if len(seen) % 3 == 0:
                break
    assert seen == dataset.keys


@pytest.mark.parametrize("states", [None, ["layer_5", "final"]])
def test_shards_behind_a_url_are_read_too(dataset: SyntheticDataset, states: list[str] | None):
    memory = fsspec.filesystem("memory")
    for shard in dataset.shards:
        memory.pipe(f"/hs/{shard.name}", shard.read_bytes())
    rows = HiddenStates(
        data_files={"train": ["memory://hs/train-*.tar"]}, states=states, max_tokens=6
    ).as_streaming_dataset(split="train")
    samples = list(rows)
    assert keys_of(samples) == dataset.keys
    for sample in samples:
        expected = dataset.bits(sample["key"])
        assert list(sample) == ["key", "input_ids", "loss_mask", *(states or list(expected)[2:])]
        np.testing.assert_array_equal(bits_of(sample["final"]), expected["final"][:6])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{"hidden_size": 8}, {"layers": (2, 5, 8)}])
def test_shards_of_two_datasets_in_one_list_are_refused(tmp_path: Path, options: dict, num_workers: int):
    parts = (
        make_dataset(tmp_path / "a", lengths=(3,)),  # a shard each, and so a worker each
        make_dataset(tmp_path / "b", lengths=(3,), **options),
    )
    shards = [str(shard) for part in parts for shard in part.shards]
    rows = HiddenStates(data_files={"train": shards}).as_streaming_dataset(split="train")
    with pytest.raises(DataError, match="different datasets"):
        list(DataLoader(rows, batch_size=None, num_workers=num_workers))


def test_a_cut_shard_is_an_error_and_not_the_end_of_the_data(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    shard = dataset.shards[1]
    shard.write_bytes(shard.read_bytes()[:-10_240])
    with pytest.raises(DataError, match=r"train-00001\.tar"):
        list(open_stream(dataset))


def test_a_shard_behind_a_url_that_is_cut_anywhere_is_an_error_and_not_the_end_of_the_data(tmp_path: Path):
    dataset, memory = make_dataset(tmp_path, shard_size_bytes=60_000), fsspec.filesystem("memory")
    shard = dataset.shards[0]
    content = shard.read_bytes()
    with tarfile.open(shard) as archive:
        borders = {member.name: member.offset for member in archive.getmembers()}
    assert sum(name.endswith(".meta.json") for name in borders) > 1  # so that some are between two samples
    memory.pipe("/cut/s.tar", content)
    rows = HiddenStates(data_files={"train": ["memory://cut/s.tar"]}).as_streaming_dataset
    assert list(rows(split="train"))
    for end in [*borders.values(), max(borders.values()) + 700, len(content) // 2 + 1]:
        memory.pipe("/cut/s.tar", content[:end])
        with pytest.raises(DataError, match=r"memory:/+cut/s\.tar"):
            list(rows(split="train"))


def test_options_that_can_not_be_are_refused(dataset: SyntheticDataset):
    with pytest.raises(UsageError, match="no state 'layer_3'"):
        list(open_stream(dataset, states=["layer_3"]))
    with pytest.raises(UsageError, match="max_tokens is 0"):
        open_stream(dataset, max_tokens=0)
    with pytest.raises(UsageError, match="needs data_files"):
        HiddenStates().as_streaming_dataset(split="train")


def test_a_prepared_copy_is_refused_and_the_way_out_is_named(dataset: SyntheticDataset):
    builder = HiddenStates(data_files={"train": [str(shard) for shard in dataset.shards]})
    with pytest.raises(UsageError, match="as_streaming_dataset"):
        builder.download_and_prepare()


def test_importing_the_package_does_not_import_datasets():
    code = "import sys, eaglehs.builder; assert 'datasets' not in sys.modules and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
