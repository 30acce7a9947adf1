"""Orders: a pure function of seed, epoch, rank and worker, and every sample in it once."""

import numpy as np
import pytest
from eaglehs.builder.sample_order import Ranks, epoch_order, rank_part, worker_part
from hypothesis import given
from hypothesis import strategies as st

lengths = st.lists(st.integers(1, 8192), min_size=5, max_size=60)


def parts_of(order, num_tokens, world_size: int, remainder: str = "keep") -> list[list[int]]:
    return [
        rank_part(order, num_tokens, Ranks(rank=rank, world_size=world_size, remainder=remainder)).tolist()
        for rank in range(world_size)
    ]


@given(
    world_size=st.integers(1, 5),
    num_workers=st.integers(1, 4),
    seed=st.none() | st.integers(0, 3),
    remainder=st.sampled_from(["keep", "drop", "repeat"]),
    num_tokens=lengths,
)
def test_every_sample_is_read_once_whatever_the_ranks_and_workers(world_size, num_workers, seed, remainder, num_tokens):
    order = epoch_order(len(num_tokens), seed, 0)
    parts = parts_of(order, num_tokens, world_size, remainder)
    split = [worker_part(np.asarray(part), w, num_workers) for part in parts for w in range(num_workers)]
    read = [number for part in split for number in part.tolist()]
    assert len(read) == sum(len(part) for part in parts)
    if remainder == "keep":
        assert sorted(read) == list(range(len(num_tokens)))
    else:
        assert len({len(part) for part in parts}) == 1
        assert abs(len(read) - len(num_tokens)) < world_size
        assert len(set(read)) == min(len(read), len(num_tokens))


@given(part=st.lists(st.integers(), max_size=40), num_workers=st.integers(1, 5), batch_size=st.integers(1, 6))
def test_batches_asked_for_in_turn_are_those_of_the_ranks_order(part, num_workers, batch_size):
    parts = [worker_part(np.asarray(part), worker, num_workers, batch_size).tolist() for worker in range(num_workers)]
    seen = []
    for turn in range(0, len(part), batch_size):
        for worker in parts:
            seen += worker[turn : turn + batch_size]
    assert seen == part


@given(world_size=st.integers(2, 8), seed=st.none() | st.integers(0, 3), num_tokens=lengths)
def test_ranks_see_as_many_tokens_but_for_one_sample_at_every_step(world_size, seed, num_tokens):
    parts = parts_of(epoch_order(len(num_tokens), seed, 0), num_tokens, world_size)
    steps = len(num_tokens) // world_size
    for step in range(1, steps + 1):
        sums = [sum(num_tokens[number] for number in part[:step]) for part in parts]
        assert max(sums) - min(sums) <= max(num_tokens)


@given(world_size=st.integers(2, 8), seed=st.integers(0, 3), num_tokens=lengths)
def test_at_every_step_the_ranks_see_the_next_samples_of_the_common_order(world_size, seed, num_tokens):
    order = epoch_order(len(num_tokens), seed, 0).tolist()
    parts = parts_of(np.asarray(order), num_tokens, world_size)
    for step in range(max(map(len, parts))):
        together = [part[step] for part in parts if step < len(part)]
        assert sorted(together) == sorted(order[step * world_size : (step + 1) * world_size])


def test_the_ranks_sums_stay_together_over_a_long_epoch():
    num_tokens = np.random.default_rng(0).lognormal(7.2, 0.7, 10_000).astype(int).clip(64, 8192)
    parts = parts_of(epoch_order(10_000, 0, 0), num_tokens, 16)
    sums = [num_tokens[part].sum() for part in parts]
    assert max(sums) / min(sums) < 1.01
    in_turn = [num_tokens[epoch_order(10_000, 0, 0)[rank::16]].sum() for rank in range(16)]
    assert max(in_turn) / min(in_turn) > 1.05  # what a split by turns alone would give


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_the_lowest_ranks_see_one_more_in_every_epoch(epoch: int):
    assert list(map(len, parts_of(epoch_order(8, 3, epoch), [5, 12, 33, 2, 7, 21, 1, 16], 3))) == [3, 3, 2]


def test_an_epochs_order_never_changes_with_a_version_of_numpy():
    # from the definition: sort by the first raw 64-bit words of PCG64 seeded with [seed, epoch]
    assert epoch_order(8, 7, 0).tolist() == [6, 3, 4, 0, 2, 7, 5, 1]
    assert epoch_order(8, 7, 1).tolist() == [1, 3, 2, 7, 4, 5, 0, 6]


def test_without_a_seed_the_order_is_that_of_the_shards():
    assert epoch_order(4, None, 3).tolist() == [0, 1, 2, 3]
