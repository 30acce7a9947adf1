"""The asynchronous path of the ring, on an NVIDIA GPU: buffers reused at once, strided states, memory given back.

`pytest -m gpu tests/extraction/test_ring_gpu.py`; needs torch with CUDA and no SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from eaglehs.extraction.ring import DumpRing, Piece, RingShape
from eaglehs.schemas.dump import DumpName
from torch import Tensor

from bench.gpu.ring import ring_rate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

ROWS = 2048
WIDTH = 7168
NUM_STATES = 4


def ring_into(kept: dict[str, tuple[Tensor, list[Tensor]]], *, write_s: float = 0.0, slots: int = 3) -> DumpRing:
    def keep(piece: Piece, ids: Tensor, states: Sequence[Tensor]) -> None:
        time.sleep(write_s)
        kept[piece.name.rid] = ids.clone(), [state.clone() for state in states]

    def report(fault: Exception) -> None:
        raise AssertionError("no fault was expected") from fault

    shape = RingShape(slots=slots, slot_rows=ROWS, num_states=NUM_STATES, hidden_size=WIDTH, writers=6)
    return DumpRing(shape, torch.device("cuda"), keep, report)


def whole(key: str, num_rows: int = ROWS) -> Piece:
    return Piece(name=DumpName(rid=f"eh-run-{key}-0", start=0, end=num_rows), first=0, prompt_tokens=num_rows)


def fill(value: float, num_rows: int = ROWS) -> Tensor:
    return torch.full((num_rows, WIDTH), value, dtype=torch.bfloat16, device="cuda")


def test_buffers_that_the_next_batch_overwrites_at_once_come_out_as_they_were() -> None:
    kept: dict[str, tuple[Tensor, list[Tensor]]] = {}
    ring = ring_into(kept)
    ids = torch.empty(ROWS, dtype=torch.int64, device="cuda")  # one buffer for all batches, as SGLang has
    for i in range(24):
        ids.fill_(i)
        states = [fill(10 * s + i) for s in range(NUM_STATES)]
        ring.put([whole(f"p{i}")], states, ids)
        del states  # the allocator may hand the memory to the next batch
        ids.fill_(-1)
        [fill(-1.0) for _ in range(NUM_STATES)]
    assert ring.drain(60)
    for i in range(24):
        found_ids, states = kept[f"eh-run-p{i}-0"]
        assert found_ids.eq(i).all()
        for s, state in enumerate(states):
            assert state.eq(torch.tensor(10.0 * s + i).bfloat16()).all()


def test_packed_states_come_out_bit_for_bit() -> None:
    kept: dict[str, tuple[Tensor, list[Tensor]]] = {}
    ring = ring_into(kept)
    packed = torch.randn(ROWS, (NUM_STATES - 1) * WIDTH, device="cuda").bfloat16()
    final = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
    states = [*packed.chunk(NUM_STATES - 1, dim=-1), final]
    ring.put([whole("a")], states, torch.arange(ROWS, device="cuda"))
    assert ring.drain(60)
    for found, state in zip(kept["eh-run-a-0"][1], states, strict=True):
        assert torch.equal(found.view(torch.int16), state.cpu().view(torch.int16))


def test_handing_over_does_not_wait_for_the_copy_or_the_file() -> None:
    kept: dict[str, tuple[Tensor, list[Tensor]]] = {}
    ring = ring_into(kept, write_s=0.2)
    states, ids = [fill(1.0)] * NUM_STATES, torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    ring.put([whole("warm")], states, ids)
    assert ring.drain(60)
    began = time.perf_counter()
    for i in range(3):
        ring.put([whole(f"p{i}")], states, ids)
    took_s = time.perf_counter() - began
    assert took_s < 0.1
    assert ring.drain(60)
    assert len(kept) == 4


def test_six_writers_into_shared_memory_carry_the_states_of_a_fast_server() -> None:
    rate = ring_rate(writers=6, num_batches=24)
    assert rate > 4.5, f"{rate:.2f} GB/s; a server at 78,000 tokens/s makes 4.5"
