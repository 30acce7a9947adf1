"""Any dataset, read in any way by any split of the work: each sample once, and the same bits."""

import ctypes
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from eaglehs.builder.sample_reads import FlippedBitsError, plan_reads
from eaglehs.builder.shard_source import DatasetMismatchError
from eaglehs.builder.stream import HiddenStateStream, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.factories.bits import bits_of
from tests.factories.datasets import SyntheticDataset
from tests.factories.memory import held_bytes
from tests.factories.readable import assert_all_samples, make_readable
from tests.fakes.range_server import RangeServer, start_range_server

MODES = ("map", "arena", "verified", "http", "cached")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="module")
def server(dataset: SyntheticDataset) -> Iterator[RangeServer]:
    server = start_range_server(dataset.root)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def open_in(mode: str, root: Path, url: str, cache: Path, **options) -> HiddenStateStream:
    if mode in ("http", "cached"):
        return stream(url, cache_dir=cache if mode == "cached" else None, connections=4, **options)
    if mode == "verified":
        return stream(root, verify=True, **options)
    return stream(root, staging=mode, **options)


@contextmanager
def inside_worker(number: int, count: int) -> Iterator[None]:
    """Make torch say that this process is a DataLoader worker."""
    module = torch.utils.data._utils.worker
    module._worker_info = module.WorkerInfo(id=number, num_workers=count, seed=0, dataset=None)
    try:
        yield
    finally:
        module._worker_info = None


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(MODES),
    world_size=st.integers(1, 3),
    num_workers=st.integers(0, 3),
    position=st.integers(0, 3),
    epoch=st.integers(0, 2),
    seed=st.none() | st.just(4),
)
def test_each_sample_once_bit_for_bit_however_the_work_is_split(
    dataset, server, cache, mode, world_size, num_workers, position, epoch, seed
):
    samples = []
    for rank in range(world_size):
        options = {"shuffle_seed": seed, "rank": rank, "world_size": world_size}
        begun = open_in(mode, dataset.root, server.url, cache, epoch=epoch, **options)
        taken = min(position, len(begun))
        samples += [kept(sample) for _, sample in zip(range(taken), begun, strict=False)]
        resumed = open_in(mode, dataset.root, server.url, cache, **options)
        state = begun.state_dict() if taken else begun.state_dict(num_consumed=0)
        resumed.load_state_dict(state)
        resumed.load_state_dict(resumed.state_dict())  # and again, without a step between
        if num_workers == 0:
            samples += resumed
        for worker in range(num_workers):
            with inside_worker(worker, num_workers):
                samples += resumed
    assert_all_samples(samples, dataset)


def kept(sample):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in sample.items()}


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    hidden_size=st.sampled_from([8, 32]),
    shard_size=st.sampled_from([10_240, 30_720, 10**6]),
    max_tokens=st.none() | st.integers(1, 70),
    states=st.none() | st.sampled_from([[], ["final"], ["layer_5"], ["layer_2", "layer_9"]]),
)
def test_any_dataset_gives_the_same_bits_in_every_mode(lengths, hidden_size, shard_size, max_tokens, states):
    with tempfile.TemporaryDirectory() as name:
        dataset = make_readable(Path(name), lengths=lengths, hidden_size=hidden_size, shard_size_bytes=shard_size)
        server = start_range_server(dataset.root)
        for mode in MODES:
            options = {"max_tokens": max_tokens, "states": states}
            seen = list(open_in(mode, dataset.root, server.url, Path(name) / "cache", **options))
            assert [sample["key"] for sample in seen] == dataset.keys
            for sample in seen:
                assert_cropped(sample, dataset, states, max_tokens)
        server.stop()


def assert_cropped(sample, dataset: SyntheticDataset, states: list[str] | None, max_tokens: int | None) -> None:
    expected = dataset.bits(sample["key"])
    names = [name for name in expected if states is None or name in ("input_ids", "loss_mask", *states)]
    assert list(sample) == ["key", *names]
    for name in names:
        own = bits_of(sample[name]) if sample[name].dtype == torch.bfloat16 else sample[name].numpy()[:, None]
        np.testing.assert_array_equal(own, expected[name][:max_tokens])


# ------------------------------------------------------------------ checks


@pytest.mark.parametrize("staging", ["map", "arena"])
@pytest.mark.parametrize("array", ["input_ids", "loss_mask", "layer_2", "final"])
def test_a_flipped_bit_is_named_where_checking_is_asked_for(tmp_path: Path, staging: str, array: str):
    dataset = make_readable(tmp_path)
    row = stream(dataset.root)._catalog.rows[3]
    with (dataset.root / row.shard).open("r+b") as shard:
        shard.seek(row.arrays[array].offset + row.arrays[array].length - 1)
        byte = shard.read(1)
        shard.seek(-1, 1)
        shard.write(bytes([byte[0] ^ 4]))
    with pytest.raises(FlippedBitsError, match=rf"{row.shard}: {array} of sample {row.key} "):
        list(stream(dataset.root, staging=staging, verify=True))
    assert len(list(stream(dataset.root, staging=staging))) == 8


@given(gap=st.sampled_from([0, 700, 10**6]), max_tokens=st.none() | st.integers(1, 40), chosen=st.integers(1, 6))
def test_spans_cover_the_wanted_rows_and_no_more_than_the_gaps(dataset, gap, max_tokens, chosen):
    row = stream(dataset.root)._catalog.rows[2]
    arrays = tuple(row.arrays)[-chosen:]
    reads = plan_reads(row, arrays, max_tokens, gap_bytes=gap)
    wanted = sum(array.length for array in reads.arrays)
    assert wanted <= sum(span.length for span in reads.spans) <= wanted + gap * (chosen - 1)
    for array in reads.arrays:
        span = next(s for s in reads.spans if s.offset <= array.offset < s.offset + s.length)
        assert array.offset + array.length <= span.offset + span.length
        assert array.start - span.start == array.offset - span.offset
        assert array.start % 64 == 0
    pieces = [piece for span in reads.spans for piece in span.pieces(97)]
    assert sum(piece.length for piece in pieces) == sum(span.length for span in reads.spans)
    assert max(piece.length for piece in pieces) <= 97


# ------------------------------------------------------------------ as a dataset of `datasets`


def test_to_datasets_gives_the_streams_own_rows(dataset: SyntheticDataset):
    samples = stream(dataset.root, shuffle_seed=3)
    rows = samples.to_datasets()
    assert_all_samples(list(rows), dataset)
    samples.set_epoch(1)
    again = stream(dataset.root, shuffle_seed=3, epoch=1)
    assert [row["key"] for row in rows] == [sample["key"] for sample in again]
    mapped = samples.to_datasets().map(lambda row: {"mean": row["final"].float().mean()})
    assert next(iter(mapped))["final"].dtype == torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_shards_in_another_order_are_named_in_every_mode(tmp_path: Path, mode: str):
    dataset = make_readable(tmp_path, lengths=[40] * 4)
    first, second = dataset.shards[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    server = start_range_server(dataset.root)
    with pytest.raises(DatasetMismatchError, match=r"train-0000\d\.tar (begins with sample p|has sha256)"):
        list(open_in(mode, dataset.root, server.url, tmp_path / "cache", max_tokens=None if mode == "cached" else 3))
    server.stop()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_of_a_long_pass_is_no_more_than_the_bound(tmp_path: Path, mode: str):
    """A sample let go is memory given back: after the first samples the process grows no more."""
    dataset = make_readable(tmp_path, lengths=[200] * 240, hidden_size=512, shard_size_bytes=10**7)
    server = start_range_server(dataset.root)
    samples = open_in(mode, dataset.root, server.url, tmp_path / "cache", prefetch_bytes="4MB")
    own = [0]
    for number, sample in enumerate(samples):
        assert sample["final"].float().nan_to_num().sum() is not None
        if number in (20, 239):
            own.append(own_bytes())
    # 179 MB passed in between. A cache brings two shards at a time, each in four pieces of up to 8 MB.
    assert own[2] - own[1] < 64_000_000
    server.stop()


def own_bytes() -> int:
    """Return what is held in memory, without what is free and kept by the allocator."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return held_bytes()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.filterwarnings("ignore:Too many dataloader workers")
def test_to_datasets_loses_nothing_in_workers(dataset: SyntheticDataset, num_workers: int):
    rows = stream(dataset.root, shuffle_seed=3).to_datasets()
    assert_all_samples(list(DataLoader(rows, batch_size=None, num_workers=num_workers)), dataset)


def test_ranks_may_be_split_by_datasets_instead(dataset: SyntheticDataset):
    parts = [split_dataset_by_node(stream(dataset.root).to_datasets(), rank, 2) for rank in range(2)]
    assert_all_samples([kept(row) for part in parts for row in part], dataset)
