"""`eaglehs.stream`: every sample once, every bit right, whatever the order, the ranks and the workers."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from eaglehs.builder.catalog import DatasetMismatchError
from eaglehs.builder.file_map import ShardCutError
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import UsageError
from torch.utils.data import DataLoader

import eaglehs
from tests.factories.bits import bits_of
from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import LENGTHS, assert_all_samples, keys_of, load, make_readable


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("stream"))


# ------------------------------------------------------------------ what comes out


def test_samples_come_in_shard_order_bit_for_bit(dataset: SyntheticDataset):
    samples = list(eaglehs.stream(dataset.root))
    assert keys_of(samples) == dataset.keys
    assert_all_samples(samples, dataset)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_give_the_same_samples_in_the_same_order(dataset: SyntheticDataset, num_workers: int):
    samples = list(load(stream(dataset.root, shuffle_seed=1), num_workers))
    assert_all_samples(samples, dataset)
    assert keys_of(samples) == keys_of(stream(dataset.root, shuffle_seed=1))


def test_spawned_workers_read_too(dataset: SyntheticDataset):
    samples = list(load(stream(dataset.root), 1, multiprocessing_context="spawn"))
    assert_all_samples(samples, dataset)


def test_chosen_states_come_alone_in_file_order(dataset: SyntheticDataset):
    sample = next(iter(stream(dataset.root, states=["final", "layer_5"])))
    assert list(sample) == ["key", "input_ids", "loss_mask", "layer_5", "final"]
    assert list(next(iter(stream(dataset.root, states=[])))) == ["key", "input_ids", "loss_mask"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_max_tokens_cuts_all_arrays_alike(dataset: SyntheticDataset, num_workers: int):
    for sample in load(stream(dataset.root, max_tokens=6), num_workers):
        expected = dataset.bits(sample["key"])
        T = min(6, len(expected["input_ids"]))
        assert {len(value) for name, value in sample.items() if name != "key"} == {T}
        np.testing.assert_array_equal(bits_of(sample["final"]), expected["final"][:T])
        assert sample["input_ids"].tolist() == expected["input_ids"][:T, 0].tolist()


def test_collate_makes_batches_in_workers(dataset: SyntheticDataset):
    loader = DataLoader(stream(dataset.root), batch_size=3, num_workers=2, collate_fn=eaglehs.collate)
    batches = list(loader)
    assert sorted(key for batch in batches for key in batch["key"]) == sorted(dataset.keys)
    assert batches[0]["final"].dtype == torch.bfloat16


def test_the_length_is_the_number_of_samples(dataset: SyntheticDataset):
    assert len(stream(dataset.root)) == len(dataset.keys)
    assert len(load(stream(dataset.root), 2)) == len(dataset.keys)
    assert [len(stream(dataset.root, rank=rank, world_size=3)) for rank in range(3)] == [3, 3, 2]


def test_a_change_to_a_sample_reaches_neither_the_file_nor_the_next_pass(dataset: SyntheticDataset):
    samples = stream(dataset.root)
    for sample in samples:
        sample["final"].zero_()
        sample["loss_mask"].fill_(0)
    assert_all_samples(list(samples), dataset)


def test_tensors_outlive_the_stream_and_the_files(tmp_path: Path):
    dataset = make_readable(tmp_path)
    samples = list(stream(dataset.root))
    for shard in dataset.shards:
        shard.unlink()
    for sample in samples:
        np.testing.assert_array_equal(bits_of(sample["final"]), dataset.bits(sample["key"])["final"])


# ------------------------------------------------------------------ order


def test_a_shuffle_depends_on_seed_and_epoch_alone(dataset: SyntheticDataset):
    def order(seed: int, epoch: int) -> list[str]:
        return keys_of(stream(dataset.root, shuffle_seed=seed, epoch=epoch))

    assert order(7, 0) == order(7, 0)
    assert len({tuple(order(seed, epoch)) for seed in (7, 8) for epoch in (0, 1, 2)}) == 6
    assert all(sorted(order(7, epoch)) == sorted(dataset.keys) for epoch in range(3))


def test_set_epoch_gives_the_order_that_a_new_stream_of_that_epoch_has(dataset: SyntheticDataset):
    samples = stream(dataset.root, shuffle_seed=7)
    list(samples)
    samples.set_epoch(1)
    assert samples.epoch == 1
    assert keys_of(samples) == keys_of(stream(dataset.root, shuffle_seed=7, epoch=1))


def test_set_epoch_reaches_persistent_workers(dataset: SyntheticDataset):
    samples = stream(dataset.root, shuffle_seed=7)
    loader = load(samples, 2, persistent_workers=True)
    orders = []
    for epoch in range(3):
        samples.set_epoch(epoch)
        orders.append(keys_of(loader))
    assert orders == [keys_of(stream(dataset.root, shuffle_seed=7, epoch=epoch)) for epoch in range(3)]


def test_a_second_pass_in_the_same_order_warns_once_it_is_shuffled(dataset: SyntheticDataset):
    samples = stream(dataset.root, shuffle_seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(samples)
        samples.set_epoch(1)
        list(samples)
        unshuffled = stream(dataset.root)
        assert keys_of(unshuffled) == keys_of(unshuffled)
    with pytest.warns(UserWarning, match="epoch 1 is read again, in the same order; call set_epoch"):
        list(samples)


# ------------------------------------------------------------------ ranks


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_share_the_samples_without_overlap(dataset: SyntheticDataset, num_workers: int):
    parts = [
        keys_of(load(stream(dataset.root, shuffle_seed=3, rank=rank, world_size=3), num_workers)) for rank in range(3)
    ]
    assert sorted(key for part in parts for key in part) == sorted(dataset.keys)


def test_ranks_stay_in_step_in_one_common_order(dataset: SyntheticDataset):
    whole = keys_of(stream(dataset.root, shuffle_seed=3))
    ranks = [keys_of(stream(dataset.root, shuffle_seed=3, rank=rank, world_size=3)) for rank in range(3)]
    for step, together in enumerate(zip(*ranks, strict=False)):
        assert sorted(together) == sorted(whole[3 * step : 3 * step + 3])


@pytest.mark.parametrize(("remainder", "lengths"), [("keep", [3, 3, 2]), ("drop", [2, 2, 2]), ("repeat", [3, 3, 3])])
def test_ranks_end_together_where_that_is_asked_for(dataset: SyntheticDataset, remainder: str, lengths: list[int]):
    streams = [stream(dataset.root, rank=rank, world_size=3, remainder=remainder) for rank in range(3)]
    assert [len(list(samples)) for samples in streams] == [len(samples) for samples in streams] == lengths


def test_rank_and_world_size_come_from_the_launchers_variables(dataset: SyntheticDataset, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert keys_of(stream(dataset.root)) == keys_of(stream(dataset.root, rank=1, world_size=2))
    assert len(stream(dataset.root)) == 4
    assert keys_of(stream(dataset.root, rank=0, world_size=1)) == dataset.keys


def test_rank_and_world_size_come_from_torch_distributed_and_the_loop_ends_on_both(dataset: SyntheticDataset, tmp_path):
    code = """
import sys, torch, torch.distributed as dist, eaglehs
rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
keys = []
for sample in eaglehs.stream(sys.argv[1], remainder="repeat"):
    dist.all_reduce(sample["final"][:1, :1].float())
    keys.append(sample["key"])
dist.destroy_process_group()
print(",".join(keys))
"""
    dataset = make_readable(tmp_path, lengths=(5, 6, 7, 8, 9))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(dataset.root), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].strip().splitlines()[-1].split(",") for process in ranks]
    assert outputs == [["p1", "p2", "p4"], ["p0", "p3", "p0"]]


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": ["layer_3"]}, "no state 'layer_3' in the dataset; it has layer_2, layer_5, layer_9, final"),
        ({"states": "final"}, r"states=\['final'\]"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5, not a whole number"),
        ({"max_tokens": "8"}, "max_tokens is '8', not a whole number"),
        ({"batch_size": True}, "batch_size is True, not a whole number"),
        ({"rank": "0", "world_size": 2}, "rank is '0', not a whole number"),
        ({"rank": -1, "world_size": 2}, "rank is -1"),
        ({"shuffle_seed": -1}, "shuffle_seed is -1"),
        ({"epoch": -1}, "epoch is -1"),
        ({"rank": 1}, "Give both or none"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
        ({"remainder": "pad"}, "remainder is 'pad'"),
        ({"staging": "ring"}, "staging is 'ring'"),
        ({"prefetch_bytes": 0}, "prefetch_bytes is 0"),
        ({"prefetch_bytes": "much"}, "'much' is not a size"),
        ({"connections": 0}, "connections is 0"),
        ({"revision": "main"}, "which is a local folder"),
        ({"rank": 0, "world_size": 9, "remainder": "drop"}, "8 samples for 9 ranks"),
    ],
)
def test_an_option_that_can_not_be_is_refused_at_once(dataset: SyntheticDataset, options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        stream(dataset.root, **options)


def test_a_shard_cut_after_opening_is_an_error_and_not_a_crash(tmp_path: Path):
    dataset = make_readable(tmp_path)
    samples = stream(dataset.root)
    shard = dataset.shards[0]
    os.truncate(shard, 2048)
    with pytest.raises(ShardCutError, match="eaglehs verify"):
        list(samples)


def test_a_shard_of_another_packing_under_the_same_name_and_size_is_refused(tmp_path: Path):
    dataset = make_readable(tmp_path / "a")
    other = make_readable(tmp_path / "b", lengths={f"q{n}": length for n, length in enumerate(LENGTHS)})
    dataset.shards[1].write_bytes(other.shards[1].read_bytes())
    with pytest.raises(DatasetMismatchError, match=r"train-00001\.tar begins with sample q"):
        list(stream(dataset.root))
