"""What reading a sample costs: the bytes that are asked for, no descriptors, no whole shards."""

import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from eaglehs.builder.sample_map import check_shared_memory
from eaglehs.builder.stream import stream
from eaglehs.schemas.errors import StorageError

from tests.factories.bits import bits_of
from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import keys_of, make_readable


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("stream"))


def test_no_byte_is_read_that_is_not_asked_for(tmp_path: Path):
    """Bytes of other states, of tails past max_tokens and of other ranks' samples may be gone: nobody looks."""
    dataset = make_readable(tmp_path, lengths=(900, 901, 902, 903), hidden_size=512, shard_size_bytes=10**8)
    rows = {row.key: row for row in stream(dataset.root)._catalog.rows}
    others = keys_of(stream(dataset.root, rank=1, world_size=2))
    shard = dataset.shards[0]
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        for key, row in rows.items():
            for name, place in row.arrays.items():
                if key in others or name in ("layer_2", "layer_9"):
                    continue_from = place.offset
                elif name in ("layer_5", "final"):
                    continue_from = place.offset + 4 * 1024
                else:
                    continue
                file.seek(continue_from)
                file.write(b"\xee" * (place.offset + place.length - continue_from))
    assert shard.stat().st_size == size
    options = {"states": ["layer_5", "final"], "max_tokens": 4, "rank": 0, "world_size": 2}
    for sample in stream(dataset.root, **options):
        np.testing.assert_array_equal(bits_of(sample["final"]), dataset.bits(sample["key"])["final"][:4])
    before = touched_bytes()
    held = list(stream(dataset.root, **options))
    for sample in held:
        assert sum(value.float().sum() for name, value in sample.items() if name != "key") is not None
    assert touched_bytes() - before < 3_000_000  # of 3.7 MB a sample, two samples: pages around the rows alone


def touched_bytes() -> int:
    """Return the pages that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_kept_samples_cost_no_descriptors(dataset: SyntheticDataset):
    before = len(os.listdir("/proc/self/fd"))
    kept = [sample for _ in range(100) for sample in stream(dataset.root)]
    assert len(kept) == 800
    assert len(os.listdir("/proc/self/fd")) <= before + 100  # one a stream: the cell that it shares with its workers


def test_samples_of_workers_can_be_kept_under_a_low_limit_of_open_files(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[3] * 150, shard_size_bytes=10**6)
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import eaglehs
from torch.utils.data import DataLoader
kept = list(eaglehs.stream(sys.argv[1])) + list(eaglehs.stream(sys.argv[1]))
kept += list(DataLoader(eaglehs.stream(sys.argv[1]), batch_size=None, num_workers=2))
print(len(kept), sum(len(sample) - 1 for sample in kept))
"""
    done = subprocess.run([sys.executable, "-c", code, str(dataset.root)], capture_output=True, text=True, check=False)
    assert done.stdout == "450 2700\n", done.stderr[-2000:]


def test_what_is_saved_of_a_sample_is_not_the_whole_shard(tmp_path: Path):
    dataset = make_readable(tmp_path, lengths=[300] * 20, hidden_size=64, shard_size_bytes=10**8)
    *_, sample = stream(dataset.root)
    assert len(pickle.dumps(sample)) < 4 * dataset.shards[0].stat().st_size // 20


def test_too_small_a_shared_memory_is_named_before_torch_dies_of_it(tmp_path: Path):
    check_shared_memory(1000, tmp_path)
    with pytest.raises(StorageError, match=r"does not fit into .* num_workers=0"):
        check_shared_memory(10**18, tmp_path)
    check_shared_memory(10**18, tmp_path / "no such folder")


def test_a_pass_keeps_no_sample_in_memory_but_the_one_at_hand_and_what_is_read_ahead(dataset: SyntheticDataset):
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(dataset.folder.data))

    for sample in stream(dataset.root, shuffle_seed=0, prefetch_bytes=1):
        assert sample["key"] in dataset.keys
        assert num_mappings() <= 3  # this one, the next one and, until the name is bound anew, the one before
    del sample
    assert num_mappings() == 0
