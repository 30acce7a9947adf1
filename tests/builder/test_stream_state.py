"""A stopped loop goes on with the very next sample: without workers, with them, twice in a row."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import RecordError, UsageError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

import eaglehs
from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import keys_of, load, make_readable


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("stream"))


@pytest.mark.parametrize("seed", [None, 5])
def test_resume_twice_in_a_row_goes_on_where_the_loop_was(dataset: SyntheticDataset, seed: int | None):
    seen, state = [], None
    for _ in range(3):
        samples = stream(dataset.root, shuffle_seed=seed)
        if state is not None:
            samples.load_state_dict(state)
        for sample in samples:
            seen.append(sample["key"])
            state = samples.state_dict()
            if len(seen) % 3 == 0:
                break
    assert seen == keys_of(stream(dataset.root, shuffle_seed=seed))


@settings(max_examples=25)
@given(position=st.integers(0, 8), epoch=st.integers(0, 2), world_size=st.integers(1, 3), seed=st.none() | st.just(4))
def test_a_resumed_loop_sees_what_an_unbroken_one_would(dataset, position, epoch, world_size, seed):
    options = {"shuffle_seed": seed, "rank": world_size - 1, "world_size": world_size}
    whole = keys_of(stream(dataset.root, epoch=epoch, **options))
    position = min(position, len(whole))
    samples = stream(dataset.root, epoch=epoch, **options)
    begun = [sample["key"] for _, sample in zip(range(position), samples, strict=False)]
    resumed = stream(dataset.root, **options)
    resumed.load_state_dict(samples.state_dict())
    assert begun + keys_of(resumed) == whole


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 0), (0, 3), (3, 2)])
def test_resume_with_workers_by_the_loops_own_count(dataset: SyntheticDataset, before: int, after: int):
    whole = keys_of(stream(dataset.root, shuffle_seed=5))
    samples = stream(dataset.root, shuffle_seed=5, batch_size=1)
    iterator = iter(load(samples, before))
    seen = [next(iterator)["key"] for _ in range(3)]
    state = samples.state_dict(num_consumed=3)
    del iterator
    for _ in range(2):
        samples = stream(dataset.root, shuffle_seed=5, batch_size=1)
        samples.load_state_dict(state)
        iterator = iter(load(samples, after))
        seen += [next(iterator)["key"] for _ in range(2)]
        state = samples.state_dict(num_consumed=2)
        del iterator
    assert seen == whole[:7]


@pytest.mark.parametrize(("num_workers", "num_batches"), [(2, 1), (2, 3), (3, 2), (0, 1)])
def test_a_loop_over_batches_of_workers_resumes_exactly(dataset: SyntheticDataset, num_workers: int, num_batches: int):
    whole = keys_of(stream(dataset.root, shuffle_seed=5))
    samples = stream(dataset.root, shuffle_seed=5, batch_size=2)
    options = {"num_workers": num_workers, "batch_size": 2, "collate_fn": eaglehs.collate}
    seen = [key for batch in islice(DataLoader(samples, **options), num_batches) for key in batch["key"]]
    assert seen == whole[: 2 * num_batches]
    state = samples.state_dict(num_consumed=len(seen)) if num_workers else samples.state_dict()
    samples.load_state_dict(state)
    assert seen + [key for batch in DataLoader(samples, **options) for key in batch["key"]] == whole


@pytest.mark.parametrize(("own", "loaders"), [(1, 2), (4, 2), (2, 4)])
def test_a_count_of_batches_of_another_size_than_the_streams_is_refused(dataset: SyntheticDataset, own, loaders):
    """Workers are asked in turn for a batch each, so the loop has not taken the first samples of the order."""
    samples = stream(dataset.root, batch_size=own)
    loader = DataLoader(samples, batch_size=loaders, num_workers=2, collate_fn=in_halves)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(UsageError, match=rf"batches of {loaders} samples.* of {own}\b.*batch_size={loaders}\)"):
        samples.state_dict(num_consumed=loaders)
    samples.set_epoch(1)
    assert samples.state_dict(num_consumed=loaders)["position"] == loaders
    with pytest.raises(UsageError, match="batch_size is 0"):
        stream(dataset.root, batch_size=0)


@pytest.mark.parametrize("loaders", [None, 1, 3])
def test_a_count_of_batches_that_nobody_has_told_of_is_refused(dataset: SyntheticDataset, loaders: int | None):
    """With a collate_fn of one's own: a loop over batches of 3 has taken 0, 2, 4 of the order, and a resume loses 1."""
    options = {"batch_size": loaders, "num_workers": 2, "collate_fn": the_keys}
    samples = stream(dataset.root)
    iterator = iter(DataLoader(samples, **options))
    next(iterator)
    with pytest.raises(UsageError, match=r"nobody has told which batches.*batch_size=N\), and 1 if"):
        samples.state_dict(num_consumed=loaders or 1)
    told = stream(dataset.root, batch_size=loaders or 1)
    loop = iter(DataLoader(told, **options))
    first = next(loop)
    told.load_state_dict(told.state_dict(num_consumed=loaders or 1))
    del loop
    assert the_keys(first) + keys_of(told) == dataset.keys


def the_keys(samples) -> list[str]:
    """Make a batch as no collate of eaglehs does; of a single sample too."""
    if isinstance(samples, dict):
        return [samples["key"]]
    return [sample if isinstance(sample, str) else sample["key"] for sample in samples]


def test_a_collate_of_ones_own_may_tell_of_its_batches(dataset: SyntheticDataset):
    samples = stream(dataset.root, batch_size=2)
    iterator = iter(DataLoader(samples, batch_size=3, num_workers=2, collate_fn=the_keys_told))
    next(iterator)
    with pytest.raises(UsageError, match=r"batches of 3 samples.* of 2\b"):
        samples.state_dict(num_consumed=3)


def the_keys_told(samples: list) -> list[str]:
    get_worker_info().dataset.note_batch()
    return the_keys(samples)


def in_halves(samples: list) -> list[dict]:
    """What a loop that sums gradients may want: the batch is what the loader asked for, not what is collated."""
    middle = len(samples) // 2
    return [eaglehs.collate(samples[:middle]), eaglehs.collate(samples[middle:])]


@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_resumed_pass_through_workers_the_next_one_is_whole(dataset: SyntheticDataset, persistent: bool):
    samples = stream(dataset.root)
    samples.load_state_dict(samples.state_dict(num_consumed=5))
    loader = load(samples, 2, persistent_workers=persistent)
    assert keys_of(loader) == dataset.keys[5:]
    assert keys_of(loader) == dataset.keys
    assert keys_of(samples) == dataset.keys


def test_after_a_resumed_pass_without_workers_one_through_them_is_whole(dataset: SyntheticDataset):
    samples = stream(dataset.root)
    samples.load_state_dict(samples.state_dict(num_consumed=5))
    assert keys_of(samples) == dataset.keys[5:]
    assert keys_of(load(samples, 2)) == dataset.keys


def test_another_epoch_begins_at_its_start_even_in_the_middle_of_a_pass(dataset: SyntheticDataset):
    samples = stream(dataset.root, shuffle_seed=5)
    next(iter(samples))
    samples.set_epoch(1)
    state = samples.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 9}, "position 9 is not in an epoch of 8 samples"),
        ({"position": -1}, "position -1 is not in an epoch"),
        ({"epoch": -1}, "epoch is -1"),
        ({"taken": -1}, "taken is -1"),
    ],
)
def test_a_state_that_points_out_of_an_epoch_is_refused(dataset: SyntheticDataset, change: dict, message: str):
    """It was an epoch without a sample, in silence."""
    samples = stream(dataset.root)
    with pytest.raises(UsageError, match=message):
        samples.load_state_dict({**samples.state_dict(), **change})


def test_a_count_is_asked_for_where_workers_read_ahead(dataset: SyntheticDataset):
    samples = stream(dataset.root, batch_size=1)
    next(iter(load(samples, 1)))
    with pytest.raises(UsageError, match="read ahead of the loop"):
        samples.state_dict()
    with pytest.raises(UsageError, match="position 9 is not in an epoch of 8 samples"):
        samples.state_dict(num_consumed=9)


def test_a_loader_that_keeps_each_workers_state_resumes_exactly(dataset: SyntheticDataset):
    # what torchdata's StatefulDataLoader does: state_dict and load_state_dict are called inside each worker
    whole, states, seen = keys_of(stream(dataset.root)), [], []
    for worker in range(2):
        with inside_worker(worker, 2):
            samples = stream(dataset.root)
            iterator = iter(samples)
            seen += [next(iterator)["key"] for _ in range(1 + worker)]
            states.append(samples.state_dict())
    for worker in range(2):
        with inside_worker(worker, 2):
            samples = stream(dataset.root)
            samples.load_state_dict(states[worker])
            seen += keys_of(samples)
    assert sorted(seen) == sorted(whole)
    with inside_worker(0, 2), pytest.raises(UsageError, match=r"of worker 1 of 2, .* this is worker 0 of 2"):
        stream(dataset.root).load_state_dict(states[1])
    with inside_worker(1, 2), pytest.raises(UsageError, match=r"in batches of 1, .* in batches of 4"):
        stream(dataset.root, batch_size=4).load_state_dict(states[1])


class inside_worker:  # noqa: N801 - reads as a verb in a with line
    """Makes torch say that this process is a DataLoader worker."""

    def __init__(self, number: int, count: int) -> None:
        self.info = torch.utils.data._utils.worker.WorkerInfo(id=number, num_workers=count, seed=0, dataset=None)

    def __enter__(self) -> None:
        torch.utils.data._utils.worker._worker_info = self.info

    def __exit__(self, *_: object) -> None:
        torch.utils.data._utils.worker._worker_info = None


def test_the_state_at_the_end_of_an_epoch_leads_to_the_next(dataset: SyntheticDataset):
    samples = stream(dataset.root, shuffle_seed=5)
    list(samples)
    resumed = stream(dataset.root, shuffle_seed=5)
    resumed.load_state_dict(samples.state_dict())
    resumed.set_epoch(0)
    assert keys_of(resumed) == []
    resumed.set_epoch(1)
    assert keys_of(resumed) == keys_of(stream(dataset.root, shuffle_seed=5, epoch=1))


def test_a_state_is_plain_json_types(dataset: SyntheticDataset):
    import json

    state = stream(dataset.root, shuffle_seed=5).state_dict()
    assert json.loads(json.dumps(state)) == state
    assert (state["kind"], state["version"], state["position"]) == ("eaglehs.stream", 1, 0)


def test_a_state_of_another_order_or_dataset_is_refused(dataset: SyntheticDataset, tmp_path: Path):
    state = stream(dataset.root, shuffle_seed=5).state_dict()
    for options, name in (
        ({"shuffle_seed": 6}, "shuffle_seed: 5 there, 6 here"),
        ({"shuffle_seed": 5, "rank": 0, "world_size": 2}, "world_size: 1 there, 2 here"),
        ({"shuffle_seed": 5, "remainder": "drop"}, "remainder: keep there, drop here"),
    ):
        with pytest.raises(UsageError, match=name):
            stream(dataset.root, **options).load_state_dict(state)
    other = make_readable(tmp_path, lengths=(1, 2, 3))
    with pytest.raises(UsageError, match="made with another dataset"):
        stream(other.root, shuffle_seed=5).load_state_dict(state)
    with pytest.raises(RecordError, match="state of the stream"):
        stream(dataset.root).load_state_dict({"epoch": 0})
