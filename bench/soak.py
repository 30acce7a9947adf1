"""Memory over a long pass: thousands of samples through `eaglehs.stream`, with DataLoader workers and without.

    python -m bench.soak [--samples 2000] [--sample-size 4MB] [--workers 3] [--folder DIR]

What is counted is the anonymous and shared memory of all processes, each page once (PSS); files' pages are the page
cache's. Each way runs in a process of its own. The figures are ratios to what was held after the first tenth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from eaglehs.schemas.sizes import format_size, parse_size
from torch.utils.data import DataLoader

import eaglehs
from bench.samples import TOKEN_BYTES, make_dataset
from bench.table import print_table
from tests.factories.memory import held_bytes

READINGS = 100


def soak(dataset: Path, staging: str, workers: int) -> list[int]:
    """Read all samples of `dataset` once; return the bytes held after each hundredth part of them."""
    samples = eaglehs.stream(dataset, staging=staging, shuffle_seed=0)
    buffer = torch.ones(2**28, dtype=torch.uint8)
    every = max(1, len(samples) // READINGS)
    held = []
    for number, sample in enumerate(DataLoader(samples, batch_size=None, num_workers=workers), start=1):
        for value in (value for value in sample.values() if isinstance(value, torch.Tensor)):
            buffer[: value.nbytes].copy_(value.reshape(-1).view(torch.uint8))
        if number % every == 0:
            held.append(held_bytes())
    return held


def row_of(dataset: Path, staging: str, workers: int) -> list[str]:
    command = [sys.executable, "-m", "bench.soak", "--child", str(dataset), "--staging", staging]
    done = subprocess.run([*command, "--workers", str(workers)], stdout=subprocess.PIPE, text=True, check=True)
    held: list[int] = json.loads(done.stdout)
    first = held[len(held) // 10 - 1]
    later = held[len(held) // 10 :]
    way = f"{workers} workers" if workers else f"no workers, staging={staging}"
    figures = (min(later) / first, max(later) / first, held[-1] / first)
    return [way, format_size(first), *(f"{figure:.3f}" for figure in figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--sample-size", type=parse_size, default=4_000_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on which disk; what is written there is removed")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--staging", default="auto", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(soak(options.child, options.staging, options.workers)))
        return
    with tempfile.TemporaryDirectory(prefix="eaglehs-bench-", dir=options.folder) as name:
        lengths = [options.sample_size // TOKEN_BYTES] * options.samples
        dataset = make_dataset(Path(name), lengths)
        ways = (("auto", options.workers), ("map", 0), ("arena", 0))
        rows = [row_of(dataset.root, staging, workers) for staging, workers in ways]
        size = format_size(dataset.manifest.totals.size_bytes)
    title = f"Memory while {size} of {options.samples} samples are read"
    tenth = f"after {options.samples // 10} samples"
    print_table(title, ("way", tenth, "lowest after", "highest after", "at the end"), rows)


if __name__ == "__main__":
    main()
