"""Reading ahead: in order, within the bound, errors in their place, and memory back when it is let go."""

import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from eaglehs.builder.prefetch import Prefetcher
from eaglehs.builder.sample_reads import SampleReads, plan_reads
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import DataError
from eaglehs.schemas.index import ArrayPlace, IndexRow

from tests.factories.bits import bits_of
from tests.factories.readable import make_readable

ROW_BYTES = 5


def row_of(number: int, num_tokens: int = 10) -> IndexRow:
    places = {"input_ids": 4 * num_tokens, "loss_mask": num_tokens}
    arrays = {name: ArrayPlace(offset=0, length=length, xxh3_128="0" * 32) for name, length in places.items()}
    return IndexRow(
        shard="data/train-00000.tar",
        key=f"p{number}",
        id="",
        source="",
        num_tokens=num_tokens,
        num_trainable=0,
        next_token=0,
        arrays=arrays,
    )


class SlowLoader:
    """Stands in for a source whose samples come when the test says: order, bounds and faults can't be had of a disk."""

    shares_storage = False

    def __init__(self, waits: dict[str, float] | None = None, fails: dict[str, Exception] | None = None) -> None:
        self.wake: SimpleQueue[None] = SimpleQueue()
        self.waits, self.fails = waits or {}, fails or {}
        self.taken_bytes = 0
        self.tasks_run: list[str] = []

    def plan(self, row: IndexRow) -> SampleReads:
        return plan_reads(row, ("input_ids", "loss_mask"), None)

    def take(self, reads: SampleReads, *, must: bool) -> torch.Tensor:
        self.taken_bytes += reads.block_bytes
        return torch.zeros(reads.block_bytes, dtype=torch.uint8)

    def tasks(self, reads, block):
        return [lambda: self.read(reads.row.key, block)] * 3

    def read(self, key: str, block: torch.Tensor) -> None:
        self.tasks_run.append(key)
        time.sleep(self.waits.get(key, 0))
        if key in self.fails:
            raise self.fails[key]
        block[:4] += torch.tensor([1, 0, 0, 0], dtype=torch.uint8)

    def finish(self, reads, block) -> None:
        block[4] = 7


def test_samples_come_in_order_whichever_is_there_first():
    loader = SlowLoader(waits={"p0": 0.1, "p3": 0.05})
    with Prefetcher(map(row_of, range(8)), loader, ahead_bytes=10**6, threads=4) as prefetcher:
        samples = list(prefetcher)
    assert [row.key for row, _ in samples] == [f"p{number}" for number in range(8)]
    assert all(tensors["input_ids"][0] == 3 for _, tensors in samples)  # all three tasks of each were done before


@pytest.mark.parametrize("ahead", [1, 100, 250])
def test_no_more_is_read_ahead_than_the_bound_but_always_one(ahead: int):
    loader = SlowLoader()
    size = loader.plan(row_of(0)).block_bytes
    with Prefetcher(map(row_of, range(20)), loader, ahead_bytes=ahead, threads=2) as prefetcher:
        for number, _ in enumerate(prefetcher, start=1):
            time.sleep(0.005)
            assert loader.taken_bytes - number * size <= max(ahead, size)
    assert loader.taken_bytes == 20 * size


def test_an_error_comes_after_the_samples_before_it():
    loader = SlowLoader(waits={"p0": 0.05, "p1": 0.05}, fails={"p2": DataError("cut")})
    seen = []
    prefetcher = Prefetcher(map(row_of, range(8)), loader, ahead_bytes=10**6, threads=4)
    with prefetcher, pytest.raises(DataError, match="cut"):
        seen.extend(row.key for row, _ in prefetcher)
    assert seen == ["p0", "p1"]


def test_an_error_in_the_plan_reaches_the_loop():
    def rows():
        yield row_of(0)
        raise DataError("no such row")

    with Prefetcher(rows(), SlowLoader(), ahead_bytes=10**6, threads=1) as prefetcher:
        next(prefetcher)
        with pytest.raises(DataError, match="no such row"):
            next(prefetcher)


def test_the_end_stays_the_end():
    with Prefetcher([row_of(0)], SlowLoader(), ahead_bytes=10, threads=1) as prefetcher:
        assert len(list(prefetcher)) == 1
        assert list(prefetcher) == []


def test_closing_ends_all_threads_even_those_that_wait_for_room():
    before = threading.active_count()
    prefetcher = Prefetcher(map(row_of, range(100)), SlowLoader(), ahead_bytes=1, threads=3)
    next(prefetcher)
    prefetcher.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_samples_that_are_held_keep_their_bits_while_the_arena_goes_round(tmp_path: Path):
    """The one thing that reused memory must never do: change under a sample that somebody still has."""
    dataset = make_readable(tmp_path, lengths=[300, 200, 100] * 10, hidden_size=64, shard_size_bytes=10**8)
    samples = stream(dataset.root, staging="arena", prefetch_bytes=300_000, shuffle_seed=0)
    held = []
    for epoch in range(2):
        samples.set_epoch(epoch)
        for number, sample in enumerate(samples):
            if number % 3 == 0:
                held.append({"key": sample["key"], "final": sample["final"][5:]})  # a view of a view is enough
    assert len(held) == 20
    for sample in held:
        assert (bits_of(sample["final"]) == dataset.bits(sample["key"])["final"][5:]).all()


def test_the_arena_is_used_again_and_no_larger_than_its_bound(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[400] * 40, hidden_size=64, shard_size_bytes=10**8)
    samples = stream(dataset.root, staging="arena", prefetch_bytes=600_000)
    addresses = {sample["final"].data_ptr() for _ in range(3) for sample in samples}
    assert len(addresses) <= 6  # of 120 samples
    deadline = time.monotonic() + 60
    while samples._reader._arena.lent_bytes:  # a thread that has read the last sample lets go of it in its own time
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert samples._reader._arena.size_bytes < 2_000_000


def test_a_sample_larger_than_the_bound_is_read_all_the_same(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[2000, 3, 2000], hidden_size=64, shard_size_bytes=10**8)
    for staging in ("map", "arena"):
        keys = [sample["key"] for sample in stream(dataset.root, staging=staging, prefetch_bytes=1)]
        assert keys == dataset.keys


def test_two_passes_over_one_stream_at_a_time_do_not_mix(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[300, 200, 100] * 10, hidden_size=64, shard_size_bytes=10**8)
    samples = stream(dataset.root, staging="arena", prefetch_bytes=100_000)
    for first, second in zip(samples, samples, strict=True):
        assert first["key"] == second["key"]
        assert (bits_of(first["final"]) == bits_of(second["final"])).all()
        assert (bits_of(first["final"]) == dataset.bits(first["key"])["final"]).all()
