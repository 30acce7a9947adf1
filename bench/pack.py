"""Packing and verifying: `pack` beside `cp` and what else writes such files, `verify` beside a plain read, in one run.

    python -m bench.pack [--folder DIR] [--rounds 5] [--size 2GB] [--dumps DIR] [--workers 1 2] [--growth 1GB,4GB]

All ways write the states of the same dumps and sync what they wrote; the dumps are warm in the page cache, or in memory
with `--dumps /dev/shm`. Only `pack` checks anything. The growth table runs each size in a process of its own;
`--growth 1GB,32GB` needs 64 GB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import webdataset
import xxhash
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.sequential_file import BUFFER_BYTES
from eaglehs.builder.verify import verify_dataset
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.sizes import format_size, parse_size

from bench.samples import make_dumped_run
from bench.table import cpu_seconds, measure, peak_bytes, print_table, ratio_rows

BLOCK_BYTES = 2**20
SHARD_BYTES = 1_000_000_000
"""A shard a worker; smaller than the default of 2 GB, so that rounds are short."""


class Workplace:
    """One folder with the dumps of a run, and an empty one into which each way writes."""

    def __init__(self, root: Path, dumps: Path, size_bytes: int) -> None:
        self.out = root / "out"
        self.run = make_dumped_run(dumps / "run", size_bytes).root
        self.dumps = sorted((self.run / "dumps").glob("*/*.pt"))
        self.size_bytes = sum(path.stat().st_size for path in self.dumps)

    def clear(self) -> None:
        """Empty the folder, and leave no other way's bytes to be written while this one is timed."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        os.sync()

    def synced(self, write: Callable[[], object]) -> int:
        """Write, sync every file, return the bytes."""
        write()
        for path in self.out.iterdir():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        return self.size_bytes

    def pack(self, workers: int) -> int:
        """Pack the run into `out`/dataset."""
        summary = pack_run(
            self.run, self.out / "dataset", PackSettings(shard_size_bytes=SHARD_BYTES, workers=workers), Silent()
        )
        assert not summary.set_aside, summary.set_aside
        return self.size_bytes

    def copy(self) -> None:
        """Copy the dumps."""
        subprocess.run(["cp", "--reflink=never", *map(str, self.dumps), str(self.out)], check=True)

    def direct(self) -> int:
        """Write as many bytes past the page cache, from one piece of memory: what the disk takes at most."""
        block = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        handle = os.open(self.out / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for offset in range(0, self.size_bytes, BUFFER_BYTES):
            os.pwrite(handle, block, offset)
        os.fsync(handle)
        os.close(handle)
        return self.size_bytes

    def tar(self) -> None:
        """Put the dumps into a tar file with the standard library."""
        with tarfile.open(self.out / "dumps.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for path in self.dumps:
                with path.open("rb") as file:
                    archive.addfile(archive.gettarinfo(arcname=path.name, fileobj=file), file)

    def web(self) -> None:
        """Write the arrays with webdataset's ShardWriter, as `.npy` members."""
        with webdataset.ShardWriter(str(self.out / "web-%05d.tar"), maxsize=2e9, verbose=0) as shards:
            for path in self.dumps:
                tensors = [(n, v) for n, v in torch.load(path, mmap=True).items() if isinstance(v, torch.Tensor)]
                bits = {f"{n}.npy": (v.view(torch.uint16) if v.ndim == 2 else v).numpy() for n, v in tensors}
                shards.write({"__key__": path.name.partition(".")[0], **bits})

    def save(self) -> None:
        """Write a file of torch.save a sample."""
        for path in self.dumps:
            torch.save(torch.load(path, mmap=True), self.out / path.name)


def writing(place: Workplace, workers: Iterable[int]) -> dict[str, Callable[[], int]]:
    return {
        "cp --reflink=never": lambda: place.synced(place.copy),
        **{f"pack --workers {count}": partial(place.pack, count) for count in workers},
        "O_DIRECT from memory, no reading": place.direct,
        "tarfile.addfile": lambda: place.synced(place.tar),
        "webdataset.ShardWriter": lambda: place.synced(place.web),
        "torch.save, a file a sample": lambda: place.synced(place.save),
    }


def checking(dataset: Path, workers: Iterable[int]) -> dict[str, Callable[[], int]]:
    shards = sorted((dataset / "data").iterdir())
    size_bytes = sum(path.stat().st_size for path in shards)

    def verified(workers: int) -> int:
        report = verify_dataset(dataset, workers=workers)
        assert not report.faults, report.faults
        return size_bytes

    def read(*, hashed: bool) -> int:
        buffer, total = memoryview(bytearray(BLOCK_BYTES)), 0
        for path in shards:
            digests = [hashlib.sha256(), xxhash.xxh3_128()] if hashed else []
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
                    for digest in digests:
                        digest.update(buffer[:count])
        return total

    return {
        "plain read, SHA-256 and xxh3": lambda: read(hashed=True),
        "plain read": lambda: read(hashed=False),
        **{f"verify --workers {count}": partial(verified, count) for count in workers},
    }


def growth_row(size_bytes: int, folder: Path) -> list[str]:
    """Pack and verify `size_bytes` in a process of its own."""
    command = [sys.executable, "-m", "bench.pack", "--child", str(size_bytes), "--folder", str(folder)]
    figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return [
        format_size(size_bytes),
        *(f"{figures[name]:.2f}" for name in ("wall", "cpu")),
        format_size(figures["peak"]),
    ]


def grow_here(size_bytes: int, folder: Path) -> None:
    """Print seconds a GB of pack, and the peak of pack and verify; making the run is another process's work."""
    with tempfile.TemporaryDirectory(dir=folder) as root:
        script = "import sys; from pathlib import Path; from bench.samples import make_dumped_run as m"
        command = [sys.executable, "-c", f"{script}; m(Path(sys.argv[1]), int(sys.argv[2]))"]
        subprocess.run([*command, f"{root}/run", str(size_bytes)], check=True)
        os.sync()
        cpu, begun = cpu_seconds(), time.perf_counter()
        pack_run(Path(root, "run"), Path(root, "dataset"), PackSettings(), Silent())
        wall, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
        assert not verify_dataset(Path(root, "dataset")).faults
    peak = peak_bytes()
    print(json.dumps({"wall": wall / size_bytes * 1e9, "cpu": cpu / size_bytes * 1e9, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on which disk; all that is written there is removed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", type=parse_size, default=2_000_000_000, help="bytes of dumps a round")
    parser.add_argument("--dumps", type=Path, help="where dumps lie, if not in the folder")
    parser.add_argument("--growth", default="1GB,4GB", help="sizes of the growth table; empty: none")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        grow_here(given.child, given.folder)
        return
    folder = given.folder or Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=folder) as root, tempfile.TemporaryDirectory(dir=given.dumps or root) as dumps:
        place = Workplace(Path(root), Path(dumps), given.size)
        size = f"{format_size(place.size_bytes)} of {len(place.dumps)} dumps, {given.rounds} rounds"
        measured = measure(writing(place, given.workers), given.rounds, before=place.clear)
        columns = ("way", "GB/s", "of cp", "spread", "CPU s/GB")
        print_table(f"Dumps to files, {size}", columns, ratio_rows(measured, "cp --reflink=never"))
        place.clear()
        place.pack(1)
        base = "plain read, SHA-256 and xxh3"
        measured = measure(checking(place.out / "dataset", given.workers), given.rounds)
        print_table("Reading shards", ("way", "GB/s", "of the first", "spread", "CPU s/GB"), ratio_rows(measured, base))
    rows = [growth_row(parse_size(size), folder) for size in given.growth.split(",") if size]
    print_table("Growth of pack, one worker", ("dumps", "s/GB", "CPU s/GB", "peak, with verify"), rows)


if __name__ == "__main__":
    main()
