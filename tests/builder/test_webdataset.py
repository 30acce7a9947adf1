"""Stock `webdataset` reads what we pack, decoded or raw."""

import pytest
import torch
import webdataset
from eaglehs.builder.decode import decode
from eaglehs.schemas.states import array_specs
from torch.utils.data import DataLoader
from webdataset import autodecode

from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import assert_all_samples, make_readable


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("webdataset"))


def open_shards(dataset: SyntheticDataset) -> webdataset.WebDataset:
    return webdataset.WebDataset([str(shard) for shard in dataset.shards], shardshuffle=False, empty_check=False)


def test_decoded_samples_are_the_same_bits(dataset: SyntheticDataset):
    samples = list(open_shards(dataset).decode())
    assert [sample["__key__"] for sample in samples] == dataset.keys
    assert_all_samples([decode(sample) for sample in samples], dataset)


def test_raw_members_are_the_same_bits(dataset: SyntheticDataset):
    assert_all_samples([decode(sample) for sample in open_shards(dataset)], dataset)


def test_a_dataloader_with_workers_gives_each_sample_once(dataset: SyntheticDataset):
    loader = DataLoader(open_shards(dataset).decode().map(decode), batch_size=None, num_workers=2)
    # its `map` puts `__key__` and the like back into what the function returned
    samples = [{name: value for name, value in sample.items() if name[:2] != "__"} for sample in loader]
    assert_all_samples(samples, dataset)


def test_a_state_is_viewed_as_bfloat16_without_our_code(dataset: SyntheticDataset):
    for sample in open_shards(dataset).decode():
        state = torch.from_numpy(sample["final.bf16.npy"]).view(torch.bfloat16)
        assert state.shape == (len(sample["input_ids.npy"]), 16)
        assert sample["meta.json"]["key"] == sample["__key__"]


def test_our_columns_mean_to_the_reader_what_they_mean_to_us():
    # the decoder goes by what follows the last dot; nothing of ours may be taken for a picture, a number or text
    assert autodecode.decoders["npy"] is autodecode.npy_loads
    for spec in array_specs((3, 31, 59), 7168):
        assert spec.member.rsplit(".", 1)[-1] == "npy"
    assert "npy" not in autodecode.IMAGE_EXTENSIONS
