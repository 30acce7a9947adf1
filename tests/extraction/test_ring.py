"""The ring between the forward pass and the files: the right rows, in any batch, however slow or broken the disk is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from eaglehs.extraction.ring import DumpRing, Piece, RingShape, slot_groups
from eaglehs.extraction.sink import DumpWriteError, write_dump
from eaglehs.schemas.dump import DumpName
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

WIDTH = 8
NUM_STATES = 2

Written = dict[str, tuple[list[int], list[Tensor]]]


def piece(key: str, first: int, start: int, num_rows: int, prompt_tokens: int | None = None) -> Piece:
    name = DumpName(rid=f"eh-run-{key}-0", start=start, end=start + num_rows)
    return Piece(name=name, first=first, prompt_tokens=prompt_tokens)


def shape(slots: int = 2, slot_rows: int = 16, writers: int = 2) -> RingShape:
    return RingShape(slots=slots, slot_rows=slot_rows, num_states=NUM_STATES, hidden_size=WIDTH, writers=writers)


def batch(num_rows: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(num_rows, WIDTH, generator=generator).bfloat16() for _ in range(NUM_STATES)]
    return states, torch.randint(1000, (num_rows,), generator=generator)


class Recorder:
    """Stands for the disk: keeps what it is given, after an optional wait or instead of an error."""

    def __init__(self, before: Callable[[Piece], None] = lambda _: None) -> None:
        self.before = before
        self.written: Written = {}
        self.faults: list[Exception] = []

    def write(self, found: Piece, ids: Tensor, states: Sequence[Tensor]) -> None:
        self.before(found)
        self.written[found.name.filename] = ids.tolist(), [state.clone() for state in states]


def ring_of(recorder: Recorder, form: RingShape) -> DumpRing:
    return DumpRing(form, torch.device("cpu"), recorder.write, recorder.faults.append)


def assert_rows(recorder: Recorder, pieces: Sequence[Piece], states: Sequence[Tensor], ids: Tensor) -> None:
    for wanted in pieces:
        found_ids, found_states = recorder.written[wanted.name.filename]
        rows = slice(wanted.first, wanted.end)
        assert found_ids == ids[rows].tolist()
        for found, state in zip(found_states, states, strict=True):
            assert torch.equal(found, state[rows])


def test_each_request_gets_its_own_rows_of_a_batch_with_foreign_ones_between() -> None:
    recorder = Recorder()
    ring = ring_of(recorder, shape())
    states, ids = batch(14)
    pieces = [piece("a", 0, 0, 3), piece("b", 3, 64, 4), piece("c", 9, 0, 5)]  # rows 7 and 8 are someone else's
    ring.put(pieces, states, ids)
    assert ring.drain(60)
    assert_rows(recorder, pieces, states, ids)
    assert len(recorder.written) == 3


def test_strided_states_and_long_ids_are_taken_as_well() -> None:
    recorder = Recorder()
    ring = ring_of(recorder, shape())
    packed = torch.randn(6, NUM_STATES * WIDTH).bfloat16()
    states, ids = list(packed.chunk(NUM_STATES, dim=-1)), torch.arange(6, dtype=torch.int64)
    pieces = [piece("a", 1, 0, 5)]
    ring.put(pieces, states, ids)
    assert ring.drain(60)
    assert_rows(recorder, pieces, states, ids)


def test_buffers_may_be_reused_as_soon_as_they_are_handed_over() -> None:
    may_write = threading.Event()
    recorder = Recorder(lambda _: may_write.wait(60) or None)
    ring = ring_of(recorder, shape())
    states, ids = batch(6)
    kept_states, kept_ids = [state.clone() for state in states], ids.clone()
    pieces = [piece("a", 0, 0, 6)]
    ring.put(pieces, states, ids)
    for state in states:
        state.fill_(7)
    ids.fill_(7)
    may_write.set()
    assert ring.drain(60)
    assert_rows(recorder, pieces, kept_states, kept_ids)


def test_a_batch_with_more_rows_than_a_slot_becomes_more_dumps() -> None:
    recorder = Recorder()
    ring = ring_of(recorder, shape(slots=1, slot_rows=16))
    states, ids = batch(50)
    ring.put([piece("a", 0, 0, 10), piece("b", 10, 100, 40, prompt_tokens=140)], states, ids)
    assert ring.drain(60)
    cut = [("a", 0, 0, 10), ("b", 10, 100, 6), ("b", 16, 106, 16), ("b", 32, 122, 16), ("b", 48, 138, 2)]
    assert_rows(recorder, [piece(*part) for part in cut], states, ids)
    assert len(recorder.written) == len(cut)


@given(lengths=st.lists(st.integers(1, 40), max_size=12), gap=st.integers(0, 3), slot_rows=st.integers(1, 50))
def test_groups_hold_every_row_once_in_order_and_never_too_many(lengths: list[int], gap: int, slot_rows: int) -> None:
    pieces, first = [], 0
    for i, length in enumerate(lengths):
        pieces.append(piece(f"p{i}", first, 10 * i, length))
        first += length + gap
    groups = list(slot_groups(pieces, slot_rows))
    assert all(0 < sum(part.name.num_rows for part in group) <= slot_rows for group in groups)
    rows = [
        (part.name.rid, part.name.start + row, part.first + row)
        for group in groups
        for part in group
        for row in range(part.name.num_rows)
    ]
    assert rows == [
        (whole.name.rid, whole.name.start + row, whole.first + row)
        for whole in pieces
        for row in range(whole.name.num_rows)
    ]


def test_a_slow_disk_holds_the_forward_pass_back_and_loses_nothing() -> None:
    recorder = Recorder(lambda _: time.sleep(0.02))
    ring = ring_of(recorder, shape(slots=2, writers=1))
    batches = [(piece(f"p{i}", 0, 0, 4), *batch(4, seed=i)) for i in range(12)]
    began = time.monotonic()
    for one, states, ids in batches:
        ring.put([one], states, ids)
    assert time.monotonic() - began > 0.02 * 8  # all but the slots and the writer's own had to be written first
    assert ring.drain(60)
    for one, states, ids in batches:
        assert_rows(recorder, [one], states, ids)


def test_draining_tells_when_it_gave_up() -> None:
    release = threading.Event()
    ring = ring_of(Recorder(lambda _: release.wait(60) or None), shape())
    ring.put([piece("a", 0, 0, 2)], *batch(2))
    assert not ring.drain(0.05)
    release.set()
    assert ring.drain(60)


def test_a_fault_is_told_once_and_after_it_nothing_is_written_and_nobody_waits() -> None:
    def break_on_the_second(found: Piece) -> None:
        if found.name.rid != "eh-run-p0-0":
            raise OSError(28, "No space left on device")

    recorder = Recorder(break_on_the_second)
    ring = ring_of(recorder, shape(slots=1, writers=3))
    for i in range(20):
        ring.put([piece(f"p{i}", 0, 0, 2), piece(f"q{i}", 2, 0, 2)], *batch(4))
    assert ring.drain(60)
    assert set(recorder.written) <= {"eh-run-p0-0.000000-000002.pt"}
    assert [str(fault) for fault in recorder.faults] == ["[Errno 28] No space left on device"]


@contextmanager
def tiny_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount a file system: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full_stops_capture_with_its_reason_and_leaves_only_whole_files(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:

        def write(found: Piece, ids: Tensor, states: Sequence[Tensor]) -> None:
            named = dict(zip(("layer_1", "final"), states, strict=True))
            write_dump(disk, found.name, layers=(1,), prompt_tokens=None, input_ids=ids, states=named)

        faults: list[Exception] = []
        form = RingShape(slots=2, slot_rows=2048, num_states=2, hidden_size=WIDTH, writers=2)
        ring = DumpRing(form, torch.device("cpu"), write, faults.append)
        for i in range(8):
            ring.put([piece(f"p{i}", 0, 0, 2048)], *batch(2048))
        assert ring.drain(60)
        assert isinstance(faults[0], DumpWriteError)
        assert len(faults) == 1
        assert "No space left on device" in str(faults[0])
        left = list(disk.iterdir())
        assert left
        assert all(len(torch.load(path, weights_only=True)["final"]) == 2048 for path in left)


_STOPS_CLEANLY = """
import sys, time, torch
from pathlib import Path
from tests.extraction.test_ring import Recorder, batch, piece, ring_of, shape
import atexit

class Slow(Recorder):
    def write(self, found, ids, states):
        time.sleep(0.05)
        Path(sys.argv[1], found.name.filename).write_bytes(b"x")

ring = ring_of(Slow(), shape(slots=8, writers=1))
atexit.register(ring.drain, 60)
for i in range(8):
    ring.put([piece(f"p{i}", 0, 0, 2)], *batch(2))
"""


def test_a_process_that_ends_in_order_writes_what_it_has_taken(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _STOPS_CLEANLY, tmp_path], check=True, timeout=60)
    assert len(list(tmp_path.iterdir())) == 8
