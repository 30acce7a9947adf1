"""A long pass through DataLoader workers keeps all processes as large as they were after its first samples."""

from pathlib import Path

import pytest
from eaglehs.builder.stream import stream
from torch.utils.data import DataLoader

from tests.factories.memory import held_bytes
from tests.factories.readable import make_readable

NUM_SAMPLES, AT = 400, 80


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_memory_of_loop_and_workers_stays_within_a_tenth_over_a_long_pass(tmp_path: Path):
    """Blocks allocated one by one leave holes in the workers' heaps, more with every sample."""
    dataset = make_readable(tmp_path, lengths=[250] * NUM_SAMPLES, hidden_size=512, shard_size_bytes=10**8)
    # Little beside the processes: how full it is at a sample depends on whether loop or workers are faster.
    samples = stream(dataset.root, prefetch_bytes="15MB")
    held = []
    for number, sample in enumerate(DataLoader(samples, batch_size=None, num_workers=3), start=1):
        assert sample["final"].shape == (250, 512)
        if number % 40 == 0:
            held.append(held_bytes())
    first = held[AT // 40 - 1]
    assert max(held) < 1.1 * first, [f"{one / first:.3f}" for one in held]
