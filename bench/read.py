"""Reading hidden states into a training buffer: memcpy, plain reads and every reader, on the same bytes in one run.

    python -m bench.read [--size 1GB] [--folder DIR] [--rounds 5]

Every way ends with all arrays copied into one reused buffer, which is what a training step starts from; `in place` ways
have the samples in reused memory and copy nothing more. `memcpy` copies tensors that are in memory already: the limit.
Files are warm in the page cache. Peers read the same tensors in their own format; litdata and MDS are there if they are
installed: `pip install --no-deps -r constraints/bench.txt`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
import webdataset
from eaglehs.builder import HiddenStates
from eaglehs.schemas.sizes import format_size, parse_size
from safetensors.torch import load_file, save_file

import eaglehs
from bench.memory import peaks
from bench.peers import open_peers
from bench.samples import lengths_of, make_dataset
from bench.table import measure, print_table, ratio_rows
from tests.factories.datasets import SyntheticDataset

Sample = dict[str, Any]


class Buffer:
    """The training buffer: the memory into which a step's arrays are copied."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = torch.ones(size_bytes, dtype=torch.uint8)

    def take(self, sample: Sample) -> int:
        """Copy all arrays in; returns their bytes."""
        at = 0
        for value in sample.values():
            tensor = value if isinstance(value, torch.Tensor) else _tensor(value)
            if tensor is not None:
                flat = tensor.reshape(-1).view(torch.uint8)
                self.memory[at : at + len(flat)].copy_(flat)
                at += len(flat)
        return at


def _tensor(value: object) -> torch.Tensor | None:
    return torch.from_numpy(value) if hasattr(value, "__array_interface__") else None


def drained(samples: Callable[[], Iterable[Sample]], buffer: Buffer) -> Callable[[], int]:
    return lambda: sum(buffer.take(sample) for sample in samples())


def handed(samples: Callable[[], Iterable[Sample]]) -> Callable[[], int]:
    return lambda: sum(v.nbytes for sample in samples() for v in sample.values() if isinstance(v, torch.Tensor))


def write_peers(dataset: SyntheticDataset, root: Path) -> None:
    """Write each sample as a file of torch.save (SpecForge, ModelOpt) and of safetensors (speculators)."""
    for kind in ("pt", "safetensors"):
        (root / kind).mkdir(exist_ok=True)
    for sample in eaglehs.stream(dataset.root):
        tensors = {name: value.clone() for name, value in sample.items() if name != "key"}
        if not (root / "pt" / f"{sample['key']}.pt").exists():
            torch.save(tensors, root / "pt" / f"{sample['key']}.pt")
            save_file(tensors, root / "safetensors" / f"{sample['key']}.safetensors")


def plain_read(paths: list[Path], buffer: Buffer) -> int:
    """Read whole files, 8 MiB at a time, into the buffer, one range after another."""
    total, view = 0, buffer.memory.numpy().data
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        at, size = 0, os.fstat(handle).st_size
        while at < size:
            place = at % (len(view) - 8 * 2**20)
            at += os.preadv(handle, [view[place : place + min(8 * 2**20, size - at)]], at)
        os.close(handle)
        total += size
    return total


def memcpy(dataset: SyntheticDataset, buffer: Buffer) -> Callable[[], int]:
    """Copy tensors of the samples' sizes, from memory that is larger than any cache."""
    row_bytes = [2 * 7168] * 4 + [4, 1]
    source = torch.ones(max(buffer.memory.nbytes, 600 * 2**20), dtype=torch.uint8)
    sizes = [[prompt.num_tokens * size for size in row_bytes] for prompt in dataset.run.prompts]

    def run() -> int:
        total, at = 0, 0
        for sample in sizes:
            place = 0
            for size in sample:
                at = at if at + size <= len(source) else 0
                buffer.memory[place : place + size].copy_(source[at : at + size])
                place, at = place + size, at + size
            total += place
        return total

    return run


def ways_of(dataset: SyntheticDataset, root: Path, buffer: Buffer) -> dict[str, Callable[[], int]]:
    pt, tensors = sorted((root / "pt").iterdir()), sorted((root / "safetensors").iterdir())
    shards = [str(shard) for shard in dataset.shards]

    def stock() -> Iterable[Sample]:
        return datasets.load_dataset(str(dataset.root), split="train", streaming=True)

    def builder() -> Iterable[Sample]:
        return HiddenStates(data_files={"train": shards}).as_streaming_dataset(split="train")

    def web() -> Iterable[Sample]:
        return webdataset.WebDataset(shards, shardshuffle=False).decode()

    opened = {mode: eaglehs.stream(dataset.root, staging=mode, prefetch_bytes="500MB") for mode in ("map", "arena")}
    checked = eaglehs.stream(dataset.root, verify=True)
    as_datasets = opened["map"].to_datasets()
    ways = {
        "memcpy": memcpy(dataset, buffer),
        "plain read of the shards": lambda: plain_read(dataset.shards, buffer),
        "eaglehs.stream (default: map)": drained(lambda: opened["map"], buffer),
        "eaglehs.stream, staging=arena": drained(lambda: opened["arena"], buffer),
        "eaglehs.stream, staging=arena, in place": handed(lambda: opened["arena"]),
        "eaglehs.stream, verify=True": drained(lambda: checked, buffer),
        "eaglehs.stream(...).to_datasets()": drained(lambda: as_datasets, buffer),
        "eaglehs.builder.HiddenStates": drained(builder, buffer),
        "torch.load(mmap=True), a file a sample": drained(lambda: (torch.load(p, mmap=True) for p in pt), buffer),
        "torch.load, a file a sample": drained(lambda: (torch.load(p) for p in pt), buffer),
        "safetensors, a file a sample": drained(lambda: (load_file(p) for p in tensors), buffer),
        "stock datasets, our shards": drained(stock, buffer),
        "webdataset, our shards": drained(web, buffer),
    }
    return ways | {name: drained(samples, buffer) for name, samples in open_peers(root).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    root = options.folder or Path(tempfile.mkdtemp(prefix="eaglehs-bench-"))
    try:
        root.mkdir(parents=True, exist_ok=True)
        run(root, options)
    finally:
        if options.folder is None:
            shutil.rmtree(root)


def run(root: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dataset = make_dataset(root, lengths_of(parse_size(options.size)))
    write_peers(dataset, root)
    longest = max(prompt.num_tokens for prompt in dataset.run.prompts)
    buffer = Buffer(longest * 4 * 2 * 7168 + 2**24)
    ways = ways_of(dataset, root, buffer)
    memory = peaks(ways, lambda: buffer.memory.fill_(1))  # first: forks of a process without threads
    measured = measure(ways, options.rounds)
    size = format_size(dataset.manifest.totals.size_bytes)
    title = f"Read {size} of {len(dataset.run.prompts)} samples into a training buffer, {options.rounds} rounds"
    columns = ("way", "GB/s", "of memcpy", "spread", "CPU s/GB", "memory")
    rows = ratio_rows(measured, "memcpy")
    print_table(title, columns, [[*row, format_size(memory[row[0]])] for row in rows])


if __name__ == "__main__":
    sys.exit(main())
