"""litdata on the same tensors, in the Python that has it: `python -m bench.read_litdata FOLDER ROUNDS`.

FOLDER is one that `bench.read --folder` has filled. litdata takes no bfloat16, so it gets the same bits as int16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import litdata
import torch

from bench.table import measure, print_table, ratio_rows


def write(root: Path) -> list[dict[str, int]]:
    files = sorted((root / "pt").iterdir())

    def load(number: int) -> dict[str, Any]:
        tensors = torch.load(files[number])
        return {
            name: value.view(torch.int16) if value.dtype == torch.bfloat16 else value for name, value in tensors.items()
        }

    if not (root / "lit" / "index.json").exists():
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(root / "lit"), chunk_bytes=2_000_000_000)
        (root / "lit").mkdir(exist_ok=True)
        for number in range(len(files)):
            writer[number] = load(number)
        writer.done()
        writer.merge(1)
    return [{name: value.nbytes for name, value in load(number).items()} for number in range(len(files))]


def main(root: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    sizes = write(root)
    longest = max(sum(sample.values()) for sample in sizes)
    memory, source = torch.ones(longest, dtype=torch.uint8), torch.ones(max(longest, 600 * 2**20), dtype=torch.uint8)

    def copied(samples: Callable[[], Iterable[list[torch.Tensor]]]) -> Callable[[], int]:
        def run() -> int:
            total = 0
            for sample in samples():
                at = 0
                for tensor in sample:
                    flat = tensor.reshape(-1).view(torch.uint8)
                    memory[at : at + len(flat)].copy_(flat)
                    at += len(flat)
                total += at
            return total

        return run

    def in_memory() -> Iterable[list[torch.Tensor]]:
        at = 0
        for sample in sizes:
            at = at if at + sum(sample.values()) <= len(source) else 0
            parts = []
            for size in sample.values():
                parts.append(source[at : at + size])
                at += size
            yield parts

    read = litdata.StreamingDataset(str(root / "lit"))
    ways = {
        "memcpy": copied(in_memory),
        "litdata, its own chunks": copied(lambda: (list(row.values()) for row in read)),
    }
    print_table(
        "litdata", ("way", "GB/s", "of memcpy", "spread", "CPU s/GB"), ratio_rows(measure(ways, rounds), "memcpy")
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
