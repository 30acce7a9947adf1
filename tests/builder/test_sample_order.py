"""Orders: a pure function of seed, epoch, rank and worker, and every sample in it once."""

from eaglehs.builder.sample_order import epoch_order, rank_part, worker_part
from hypothesis import given
from hypothesis import strategies as st


@given(
    world_size=st.integers(1, 5),
    num_workers=st.integers(1, 4),
    seed=st.none() | st.integers(0, 3),
    remainder=st.sampled_from(["keep", "drop", "repeat"]),
    num_samples=st.integers(5, 40),
)
def test_every_sample_is_read_once_whatever_the_ranks_and_workers(
    world_size, num_workers, seed, remainder, num_samples
):
    order = epoch_order(num_samples, seed, 0)
    parts = [rank_part(order, rank, world_size, remainder) for rank in range(world_size)]
    read = [
        number for part in parts for w in range(num_workers) for number in worker_part(part, w, num_workers).tolist()
    ]
    assert len(read) == sum(len(part) for part in parts)
    if remainder == "keep":
        assert sorted(read) == list(range(num_samples))
    else:
        assert len({len(part) for part in parts}) == 1
        assert abs(len(read) - num_samples) < world_size
        assert len(set(read)) == min(len(read), num_samples)


def test_an_epochs_order_never_changes_with_a_version_of_numpy():
    # from the definition: sort by the first raw 64-bit words of PCG64 seeded with [seed, epoch]
    assert epoch_order(8, 7, 0).tolist() == [6, 3, 4, 0, 2, 7, 5, 1]
    assert epoch_order(8, 7, 1).tolist() == [1, 3, 2, 7, 4, 5, 0, 6]


def test_without_a_seed_the_order_is_that_of_the_shards():
    assert epoch_order(4, None, 3).tolist() == [0, 1, 2, 3]
