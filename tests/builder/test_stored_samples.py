"""A few samples of a run and of its dataset, as tensors: the same rows from both, chosen the same way each time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from eaglehs.builder.stored_samples import Listed, choose_samples, open_stored
from eaglehs.schemas.errors import DataError, UsageError
from eaglehs.schemas.run import Packing

from tests.factories.bits import bits_of
from tests.factories.datasets import make_dataset
from tests.factories.runs import change_record, make_run


def listed(lengths: list[int]) -> list[Listed]:
    return [
        Listed(key=f"p{number}", num_tokens=length, next_token=0, place=f"shard{number // 10}")
        for number, length in enumerate(lengths)
    ]


def test_the_choice_spreads_over_the_whole_and_prefers_short_samples_but_not_alone():
    samples = listed([1000 - number % 100 for number in range(1000)])
    chosen = choose_samples(samples, 10, seed=0)
    assert [int(sample.key[1:]) // 100 for sample in chosen] == list(range(10))
    shorter = sorted(sample.num_tokens for sample in chosen[::2])
    others = sorted(sample.num_tokens for sample in chosen[1::2])
    assert shorter[-1] < 930
    assert others[-1] > 930


def test_the_choice_is_the_same_for_the_same_seed_and_another_for_another():
    samples = listed(list(range(1, 1001)))
    assert choose_samples(samples, 4, seed=3) == choose_samples(samples, 4, seed=3)
    assert choose_samples(samples, 4, seed=3) != choose_samples(samples, 4, seed=4)


def test_all_are_chosen_once_where_there_are_no_more():
    samples = listed([5, 5, 5])
    assert choose_samples(samples, 8, seed=0) == tuple(samples)


def test_run_and_dataset_give_the_same_first_rows_and_last_final_row(tmp_path: Path):
    dataset = make_dataset(tmp_path, chunk_rows=8)
    bits = dataset.bits("p2")
    for root in (dataset.root, dataset.run.root):
        with open_stored(root) as stored:
            assert [(item.key, item.num_tokens, item.next_token) for item in stored.listed] == [
                ("p0", 5, 0),
                ("p1", 12, 1),
                ("p2", 33, 2),
            ]
            sample = stored.read("p2", 20)
            assert sample.input_ids.dtype == torch.int32
            assert sample.input_ids.tolist() == bits["input_ids"][:20, 0].tolist()
            for state, tensor in sample.states.items():
                assert np.array_equal(bits_of(tensor), bits[state][:20]), state
            assert list(sample.states) == ["layer_2", "layer_5", "layer_9", "final"]
            assert np.array_equal(bits_of(sample.last_final), bits["final"][-1])


def test_a_damaged_dump_is_an_error_that_names_it(tmp_path: Path):
    run = make_run(tmp_path)
    dump = run.dumps_of("p1")[0]
    dump.write_bytes(dump.read_bytes()[:200])
    with open_stored(tmp_path) as stored, pytest.raises(DataError, match=dump.name):
        stored.read("p1", 10)


def test_of_a_run_that_packs_at_once_the_dataset_is_asked_for(tmp_path: Path):
    run = make_run(tmp_path)
    change_record(run, packing=Packing(dataset="/data/set", shard_size_bytes=10**9, shuffle_seed=None))
    with pytest.raises(UsageError, match="Give the dataset, /data/set"), open_stored(tmp_path):
        pass


def test_nothing_finished_is_an_error_of_usage(tmp_path: Path):
    make_run(tmp_path, unfinished=["p0", "p1", "p2"])
    with pytest.raises(UsageError, match="no finished sample"), open_stored(tmp_path):
        pass
