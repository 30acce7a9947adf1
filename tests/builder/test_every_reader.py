"""Any samples, packed in any way, read by any reader, however split and stopped: each once, the same bits."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

import datasets
import pytest
import webdataset
from eaglehs.builder import HiddenStates
from eaglehs.builder.decode import DecodedSample, decode
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.stream import HiddenStateStream, stream
from eaglehs.cards.write import write_card
from eaglehs.schemas.manifest import DatasetFolder
from eaglehs.schemas.progress import Silent
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builder.test_reader_modes import inside_worker, kept
from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import assert_all_samples
from tests.factories.runs import make_run


def packed(root: Path, lengths: list[int], pack: PackSettings) -> SyntheticDataset:
    run = make_run(root / "run", lengths=lengths)
    pack_run(run.root, root / "dataset", pack, Silent())
    write_card(root / "dataset")
    return SyntheticDataset(folder=DatasetFolder(root / "dataset"), run=run)


lengths_of_samples = st.lists(st.integers(1, 60), min_size=1, max_size=12)
ways_to_pack = st.builds(
    PackSettings,
    shard_size_bytes=st.sampled_from([20_480, 40_960, 10**6]),
    workers=st.integers(1, 3),
    shuffle_seed=st.none() | st.integers(0, 3),
)


# ------------------------------------------------------------------ eaglehs.stream: ranks, workers, stops, epochs


@settings(max_examples=25)
@given(
    lengths=lengths_of_samples,
    pack=ways_to_pack,
    staging=st.sampled_from(["map", "arena"]),
    world_size=st.integers(1, 4),
    stops=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=3),
    last_workers=st.integers(0, 3),
    batch_size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    seed=st.none() | st.integers(0, 2),
)
def test_each_sample_is_streamed_once_for_any_ranks_workers_stops_and_epoch(
    lengths, pack, staging, world_size, stops, last_workers, batch_size, epoch, seed
):
    """`stops`: with how many workers the loop ran, and how many samples it took, before it was stopped."""
    with tempfile.TemporaryDirectory() as root:
        dataset = packed(Path(root), lengths, pack)
        seen = []
        for rank in range(world_size):
            options = {"staging": staging, "shuffle_seed": seed, "batch_size": batch_size}
            options |= {"rank": rank, "world_size": world_size}
            samples, state = stream(dataset.root, epoch=epoch, **options), None
            for num_workers, wanted in stops:
                taken = [kept(sample) for sample in islice(loop_over(samples, num_workers, batch_size), wanted)]
                state = samples.state_dict(num_consumed=len(taken)) if num_workers else samples.state_dict()
                seen += taken
                samples = stream(dataset.root, **options)
                samples.load_state_dict(state)
            seen += [kept(sample) for sample in loop_over(samples, last_workers, batch_size)]
        assert_all_samples(seen, dataset)


def loop_over(samples: HiddenStateStream, num_workers: int, batch_size: int) -> Iterator[DecodedSample]:
    """Yield what a DataLoader of so many workers does: it asks them in turn for a batch; all read to their ends."""
    if num_workers == 0:
        yield from samples
        return
    parts = []
    for worker in range(num_workers):
        with inside_worker(worker, num_workers):
            part = [kept(sample) for sample in samples]
            parts.append([part[start : start + batch_size] for start in range(0, len(part), batch_size)])
    for together in zip_longest(*parts, fillvalue=[]):
        yield from chain(*together)


# ------------------------------------------------------------------ the others


def stock(dataset: SyntheticDataset) -> Iterable[DecodedSample]:
    return map(decode, datasets.load_dataset(str(dataset.root), split="train", streaming=True))


def builder_class(dataset: SyntheticDataset) -> Iterable[DecodedSample]:
    files = [str(shard) for shard in dataset.shards]
    return HiddenStates(data_files={"train": files}).as_streaming_dataset(split="train")


def web(dataset: SyntheticDataset) -> Iterable[DecodedSample]:
    return map(decode, webdataset.WebDataset([str(shard) for shard in dataset.shards], shardshuffle=False).decode())


@pytest.mark.parametrize("reader", [stock, builder_class, web])
@settings(max_examples=4)
@given(lengths=lengths_of_samples, pack=ways_to_pack)
def test_every_other_reader_gives_each_sample_once_bit_for_bit(
    reader: Callable[[SyntheticDataset], Iterable[DecodedSample]], lengths: list[int], pack: PackSettings
):
    with tempfile.TemporaryDirectory() as root:
        dataset = packed(Path(root), lengths, pack)
        assert_all_samples([kept(sample) for sample in reader(dataset)], dataset)
