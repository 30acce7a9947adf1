"""From the forward pass to the files without holding it up: a ring of host buffers and the threads that empty it.

The forward pass copies the rows of a batch into a free slot (on CUDA by a stream of its own into pinned memory) and
goes on; writer threads wait for the copy and write one dump for each request. When all slots are full the forward
pass waits: that is the back-pressure, and nothing is lost. After the first fault nothing more is written and nobody
waits; the fault is reported once.

T rows of the batch, S states (layers, then `final`), H hidden width.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..schemas.dump import DumpName

_cuda: Any = torch.cuda  # its streams and events carry no types

MAX_SLOT_ROWS = 8192
"""More rows than this are split over slots: 8,192 rows of Kimi-K2.5 are 470 MB of pinned memory a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one request that become one dump."""

    name: DumpName
    first: int
    """The first row: in the batch when handed over, in the slot when written."""

    prompt_tokens: int | None

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.first + self.name.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """How large the buffers are."""

    slots: int
    slot_rows: int
    num_states: int
    hidden_size: int
    writers: int


WritePiece = Callable[[Piece, Tensor, Sequence[Tensor]], object]
"""Writes one dump from its ids, int32 [n], and its states, bfloat16 [n, H] each."""


class _Slot:
    """One buffer; `num_open` of its pieces are not yet written."""

    def __init__(self, shape: RingShape, *, pinned: bool) -> None:
        self.states_STH = torch.empty(
            (shape.num_states, shape.slot_rows, shape.hidden_size), dtype=torch.bfloat16, pin_memory=pinned
        )
        self.ids_T = torch.empty(shape.slot_rows, dtype=torch.int32, pin_memory=pinned)
        self.num_open = 0


@dataclass(frozen=True, slots=True)
class _Job:
    slot: _Slot
    piece: Piece
    copied: Any
    """The CUDA event after the copy; None on the CPU, where the copy is done when the job is made."""


class DumpRing:
    """Takes states from the forward pass and has them written; see the module's docstring."""

    def __init__(
        self, shape: RingShape, device: torch.device, write: WritePiece, report: Callable[[Exception], object]
    ) -> None:
        """Allocate all buffers and start the writers. `report` is called once, from any thread, on the first fault.

        Pinning 400 MB takes 0.2 s: done here, when the model is loaded, and not in the first batch.
        """
        self.shape = shape
        self._write = write
        self._report = report
        self._stream: Any = _cuda.Stream(device) if device.type == "cuda" else None
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_open = 0
        self._has_failed = False
        for _ in range(shape.slots):
            self._free.put(_Slot(shape, pinned=device.type == "cuda"))
        for i in range(shape.writers):
            threading.Thread(target=self._run_writer, name=f"eaglehs-writer-{i}", daemon=True).start()

    def put(self, pieces: Sequence[Piece], states_TH: Sequence[Tensor], ids_T: Tensor) -> None:
        """Take the rows of `pieces` out of a batch; call it on the stream of the forward pass.

        `states_TH` are bfloat16 [>= T, H], on the ring's device, and may be strided; `ids_T` is int [>= T]. All may be
        reused as soon as the forward pass goes on. Waits while every slot is full.
        """
        # SGLang reuses the ids' buffer for the next batch: a copy on a side stream would read other tokens.
        ids_T = ids_T.to(dtype=torch.int32, copy=True)
        for group in slot_groups(pieces, self.shape.slot_rows):
            slot = self._free.get()
            if self._has_failed:
                self._free.put(slot)
                return
            placed = _placed(group)
            copied = self._copy(slot, group, placed, (*states_TH, ids_T))
            with self._changed:
                slot.num_open = len(placed)
                self._num_open += len(placed)
            for piece in placed:
                self._work.put(_Job(slot, piece, copied))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything handed over is written, or dropped after a fault; tell whether it is."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._num_open:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return self._num_open == 0
        return True

    def _copy(self, slot: _Slot, group: Sequence[Piece], placed: Sequence[Piece], sources: Sequence[Tensor]) -> Any:
        targets = (*slot.states_STH, slot.ids_T)
        if self._stream is None:
            _copy_spans(targets, sources, group, placed)
            return None
        self._stream.wait_stream(_cuda.current_stream(sources[0].device))
        with _cuda.stream(self._stream):
            _copy_spans(targets, sources, group, placed)
            copied = _cuda.Event()
            copied.record(self._stream)
        for source in sources:
            source.record_stream(self._stream)  # the allocator must not hand the memory on before the copy is done
        return copied

    def _run_writer(self) -> None:
        while True:
            job = self._work.get()
            try:
                if job.copied is not None:
                    job.copied.synchronize()  # lets go of the GIL
                if not self._has_failed:
                    rows = slice(job.piece.first, job.piece.end)
                    self._write(job.piece, job.slot.ids_T[rows], [state[rows] for state in job.slot.states_STH])
            except Exception as fault:  # noqa: BLE001 - a writer that died in silence would stop the server for good
                self._fail(fault)
            finally:
                self._close(job.slot)

    def _fail(self, fault: Exception) -> None:
        with self._changed:
            is_first, self._has_failed = not self._has_failed, True
        if is_first:
            self._report(fault)

    def _close(self, slot: _Slot) -> None:
        with self._changed:
            slot.num_open -= 1
            self._num_open -= 1
            if not slot.num_open:
                self._free.put(slot)
            self._changed.notify_all()


def slot_groups(pieces: Sequence[Piece], slot_rows: int) -> Iterator[list[Piece]]:
    """Yield the pieces in order, in groups of at most `slot_rows` rows; a piece that crosses a border is cut in two."""
    group: list[Piece] = []
    room = slot_rows
    for piece in pieces:
        rest = piece
        while rest.name.num_rows > room:
            if room:
                head, rest = _cut(rest, room)
                group.append(head)
            yield group
            group, room = [], slot_rows
        group.append(rest)
        room -= rest.name.num_rows
    if group:
        yield group


def _cut(piece: Piece, num_rows: int) -> tuple[Piece, Piece]:
    rid, border = piece.name.rid, piece.name.start + num_rows
    head = DumpName(rid=rid, start=piece.name.start, end=border)
    tail = DumpName(rid=rid, start=border, end=piece.name.end)
    return (
        Piece(name=head, first=piece.first, prompt_tokens=piece.prompt_tokens),
        Piece(name=tail, first=piece.first + num_rows, prompt_tokens=piece.prompt_tokens),
    )


def _placed(group: Sequence[Piece]) -> list[Piece]:
    """Return the group's pieces one after the other from the slot's first row."""
    placed: list[Piece] = []
    row = 0
    for piece in group:
        placed.append(Piece(name=piece.name, first=row, prompt_tokens=piece.prompt_tokens))
        row = placed[-1].end
    return placed


def _copy_spans(
    targets: Sequence[Tensor], sources: Sequence[Tensor], group: Sequence[Piece], placed: Sequence[Piece]
) -> None:
    for source_first, target_first, num_rows in _spans(group, placed):
        for target, source in zip(targets, sources, strict=True):
            target[target_first : target_first + num_rows].copy_(
                source[source_first : source_first + num_rows], non_blocking=True
            )


def _spans(group: Sequence[Piece], placed: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Return (first row in the batch, first row in the slot, rows) of runs that stand together in the batch."""
    spans: list[tuple[int, int, int]] = []
    for piece, place in zip(group, placed, strict=True):
        if spans and spans[-1][0] + spans[-1][2] == piece.first:
            first, target, num_rows = spans[-1]
            spans[-1] = (first, target, num_rows + piece.name.num_rows)
        else:
            spans.append((piece.first, place.first, piece.name.num_rows))
    return spans
