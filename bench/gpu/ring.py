"""How fast the ring carries states from a GPU into files in memory, by number of writer threads.

    python -m bench.gpu.ring [--writers 1 2 4 6 8] [--batches 48]

No SGLang: the same batch of four prompts of 1,730 tokens again and again, three layers and `final` of width 7168, each
dump under a name of its own and removed by the thread that wrote it. What a server makes beyond this has to wait.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from eaglehs.extraction.capture_settings import DEFAULT_SLOTS
from eaglehs.extraction.ring import DumpRing, Piece, RingShape
from eaglehs.extraction.sink import write_dump
from eaglehs.schemas.dump import DumpName
from eaglehs.schemas.states import state_names
from torch import Tensor

LAYERS = (1, 2, 3)
WIDTH, TOKENS, PROMPTS = 7168, 1730, 4
ROWS = TOKENS * PROMPTS
MEMORY = Path("/dev/shm")


def ring_rate(writers: int, num_batches: int, device: str = "cuda") -> float:
    """Return the GB/s of states that so many writers carry.

    Raises:
        RuntimeError: a dump was not written.
    """
    names = state_names(LAYERS)
    faults: list[Exception] = []
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="eaglehs-ring-") as folder:

        def write(piece: Piece, ids: Tensor, states: Sequence[Tensor]) -> None:
            named = dict(zip(names, states, strict=True))
            options = {"layers": LAYERS, "prompt_tokens": TOKENS, "input_ids": ids, "states": named}
            write_dump(Path(folder), piece.name, **options).unlink()  # type: ignore[arg-type]

        shape = RingShape(
            slots=DEFAULT_SLOTS, slot_rows=ROWS, num_states=len(names), hidden_size=WIDTH, writers=writers
        )
        ring = DumpRing(shape, torch.device(device), write, faults.append)
        states = [torch.full((ROWS, WIDTH), 1.0, dtype=torch.bfloat16, device=device)] * len(names)
        ids = torch.zeros(ROWS, dtype=torch.int64, device=device)
        ring.put(_pieces("warm"), states, ids)
        is_written = ring.drain(60)
        began = time.perf_counter()
        for number in range(num_batches):
            ring.put(_pieces(f"b{number}"), states, ids)
        is_written = ring.drain(300) and is_written
        seconds = time.perf_counter() - began
    if faults or not is_written:  # after a fault nothing more is written, and that at any speed
        raise RuntimeError(f"dumps are missing: {faults}")
    return num_batches * sum(state.nbytes for state in states) / seconds / 1e9


def _pieces(batch: str) -> list[Piece]:
    return [
        Piece(
            name=DumpName(rid=f"eh-bench-{batch}x{number}-0", start=0, end=TOKENS),
            first=TOKENS * number,
            prompt_tokens=TOKENS,
        )
        for number in range(PROMPTS)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4, 6, 8])
    parser.add_argument("--batches", type=int, default=48)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    for _ in range(given.passes):
        for writers in given.writers:
            rate = ring_rate(writers, given.batches, given.device)
            print(json.dumps({"bench": "ring", "writers": writers, "states_gb_per_s": rate}))


if __name__ == "__main__":
    main()
