"""Reading over a slow, far link: eaglehs.stream against parallel plain range reads of the same files.

    python -m bench.remote [--size 300MB] [--rate 150MB] [--latency-ms 20] [--rounds 5]

A server in a process of its own shares one link of `--rate` bytes a second among all connections, and waits before each
answer.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import torch
from eaglehs.builder.stream import HiddenStateStream
from eaglehs.schemas.sizes import format_size, parse_size

import eaglehs
from bench.samples import lengths_of, make_dataset
from bench.table import measure, print_table, ratio_rows
from tests.factories.datasets import SyntheticDataset

RANGE_BYTES = 8 * 2**20


def serve(root: Path, rate: int, latency_s: float, told: Connection) -> None:
    from tests.fakes.range_server import start_range_server

    told.send(start_range_server(root, bytes_per_s=rate, latency_s=latency_s).url)
    told.recv()


def plain_ranges(dataset: SyntheticDataset, url: str, connections: int) -> Callable[[], int]:
    """Read all shards in ranges of 8 MiB, each thread over one connection into one buffer."""
    ranges = [
        (entry.name, begin, min(begin + RANGE_BYTES, entry.size_bytes))
        for entry in dataset.manifest.shards
        for begin in range(0, entry.size_bytes, RANGE_BYTES)
    ]

    def work(number: int) -> int:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        buffer, total = memoryview(bytearray(RANGE_BYTES)), 0
        for name, begin, end in ranges[number::connections]:
            connection.request("GET", f"/{name}", headers={"Range": f"bytes={begin}-{end - 1}"})
            total += connection.getresponse().readinto(buffer[: end - begin])
        connection.close()
        return total

    def run() -> int:
        with ThreadPoolExecutor(connections) as pool:
            return sum(pool.map(work, range(connections)))

    return run


def streamed(samples: HiddenStateStream) -> Callable[[], int]:
    def run() -> int:
        samples.set_epoch(samples.epoch + 1)
        return sum(v.nbytes for sample in samples for v in sample.values() if isinstance(v, torch.Tensor))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="300MB")
    parser.add_argument("--rate", default="150MB")
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eaglehs-bench-") as name:
        dataset = make_dataset(Path(name), lengths_of(parse_size(options.size)))
        size = format_size(dataset.manifest.totals.size_bytes)
        own, other = multiprocessing.Pipe()
        place = (dataset.root, parse_size(options.rate), options.latency_ms / 1000, other)
        server = multiprocessing.get_context("spawn").Process(target=serve, args=place, daemon=True)
        server.start()
        url, connections = own.recv(), options.connections
        ordered = eaglehs.stream(url, connections=connections)
        unchecked = eaglehs.stream(url, connections=connections, verify=False)
        shuffled = eaglehs.stream(url, connections=connections, shuffle_seed=0)
        measured = measure(
            {
                f"{connections} plain range readers": plain_ranges(dataset, url, connections),
                "eaglehs.stream": streamed(ordered),
                "eaglehs.stream, shuffled": streamed(shuffled),
                "eaglehs.stream, verify=False": streamed(unchecked),
            },
            options.rounds,
        )
        own.send("stop")
        server.join()
    title = f"Read {size} over {options.rate}/s, {options.latency_ms:g} ms away"
    rows = ratio_rows(measured, next(iter(measured)))
    print_table(title, ("way", "GB/s", "of plain", "spread", "CPU s/GB"), rows)


if __name__ == "__main__":
    sys.exit(main())
