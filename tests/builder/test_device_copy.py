"""Samples on a device: the same bits, one ahead on a stream of its own, pinned memory never overwritten too early."""

from pathlib import Path

import pytest
import torch
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import UsageError

from tests.factories.readable import assert_all_samples, make_readable

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def at_home(sample):
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in sample.items()}


def test_a_device_without_streams_gets_plain_copies(tmp_path: Path):
    dataset = make_readable(tmp_path)
    assert_all_samples(list(stream(dataset.root, device="cpu")), dataset)
    assert next(iter(stream(dataset.root, device="meta")))["final"].device.type == "meta"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_pinned_memory_without_a_gpu_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="needs a GPU, and torch sees none"):
        stream(make_readable(tmp_path).root, staging="pinned")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("staging", ["auto", "map", "arena", "pinned"])
def test_samples_on_a_gpu_are_bit_for_bit(tmp_path: Path, staging: str):
    dataset = make_readable(tmp_path)
    samples = list(stream(dataset.root, device="cuda", staging=staging, shuffle_seed=1))
    assert all(sample["final"].is_cuda for sample in samples)
    assert_all_samples([at_home(sample) for sample in samples], dataset)


@pytest.mark.gpu
@needs_gpu
def test_pinned_memory_is_not_read_into_while_a_copy_from_it_is_under_way(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[2000, 1500, 1900] * 8, hidden_size=512, shard_size_bytes=10**8)
    busy = torch.ones(4096, 4096, device="cuda")
    held = []
    for sample in stream(dataset.root, device="cuda", prefetch_bytes=20_000_000):
        for _ in range(5):
            busy = busy @ busy * 0  # the loop's stream is behind: nothing must depend on its being quick
        held.append(sample)
    assert_all_samples([at_home(sample) for sample in held], dataset)


@pytest.mark.gpu
@needs_gpu
def test_pinned_samples_are_page_locked_and_used_again(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[500] * 20, hidden_size=64, shard_size_bytes=10**8)
    addresses = set()
    for sample in stream(dataset.root, staging="pinned", prefetch_bytes=600_000):
        assert sample["final"].is_pinned()
        addresses.add(sample["final"].data_ptr())
    assert len(addresses) < 10
