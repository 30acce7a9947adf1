"""A stopped loop goes on with the very next sample: without workers, with them, twice in a row."""

from pathlib import Path

import pytest
import torch
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import RecordError, UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

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
    samples = stream(dataset.root, shuffle_seed=5)
    iterator = iter(load(samples, before))
    seen = [next(iterator)["key"] for _ in range(3)]
    state = samples.state_dict(num_consumed=3)
    del iterator
    for _ in range(2):
        samples = stream(dataset.root, shuffle_seed=5)
        samples.load_state_dict(state)
        iterator = iter(load(samples, after))
        seen += [next(iterator)["key"] for _ in range(2)]
        state = samples.state_dict(num_consumed=2)
        del iterator
    assert seen == whole[:7]


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


def test_a_count_is_asked_for_where_workers_read_ahead(dataset: SyntheticDataset):
    samples = stream(dataset.root)
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
    with inside_worker(0, 2), pytest.raises(UsageError, match="of worker 1 of 2, this is worker 0 of 2"):
        stream(dataset.root).load_state_dict(states[1])


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
