"""Samples read ahead of the loop by threads, in order, within a bound in bytes.

One thread plans and finds memory, others read; both sleep in system calls or wait, so the loop's own thread is free.
Order of samples is that of the plan, whatever order their ranges come in. An error stands in the place of the sample
that it befell: the loop meets it after all samples before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from ..schemas.index import IndexRow
from .loaders import Loader, Task
from .sample_reads import SampleReads

_LONGEST_SLEEP_S = 0.1
"""Passes over one stream at a time share its arena: a call that one of them has taken must not be missed for good."""


class _Pending:
    """A sample whose ranges are being read."""

    def __init__(self, reads: SampleReads, block: torch.Tensor, num_tasks: int) -> None:
        self.reads = reads
        self.block = block
        self.fault: BaseException | None = None
        self.is_ready = threading.Event()
        self._left = num_tasks
        self._lock = threading.Lock()

    def note_done(self) -> bool:
        """Count a task; True for the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def fail(self, fault: BaseException) -> None:
        """Keep the first fault and let the loop meet it at once."""
        with self._lock:
            self.fault = self.fault or fault
        self.is_ready.set()


class Prefetcher(Iterator[tuple[IndexRow, dict[str, torch.Tensor]]]):
    """Yields the row and the tensors of each sample; `close` it, or use it in a with block.

    At most `ahead_bytes` of samples that the loop has not taken yet are in memory or being read; one sample always is,
    however large.
    """

    def __init__(self, rows: Iterable[IndexRow], loader: Loader, *, ahead_bytes: int, threads: int) -> None:
        """Begin to read."""
        self._loader = loader
        self._limit = ahead_bytes
        self._ahead = 0
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._ordered: SimpleQueue[_Pending | BaseException | None] = SimpleQueue()
        self._tasks: SimpleQueue[tuple[_Pending, Task] | None] = SimpleQueue()
        self._threads = threads
        # Daemons: a loop that ends by an error must not wait for a slow server.
        workers = [threading.Thread(target=self._work, daemon=True, name="eaglehs-read") for _ in range(threads)]
        planner = threading.Thread(target=self._plan, args=(rows,), daemon=True, name="eaglehs-plan")
        for thread in (planner, *workers):
            thread.start()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no further; what is under way ends by itself."""
        self._is_closed.set()
        self._loader.wake.put(None)
        for _ in range(self._threads):
            self._tasks.put(None)

    def __next__(self) -> tuple[IndexRow, dict[str, torch.Tensor]]:
        """Return the next sample; the memory under it comes back when its tensors are gone."""
        pending = self._ordered.get()
        if pending is None:
            self._ordered.put(None)
            raise StopIteration
        if isinstance(pending, BaseException):
            raise pending
        pending.is_ready.wait()
        with self._lock:
            self._ahead -= pending.reads.block_bytes
        self._loader.wake.put(None)
        if pending.fault is not None:
            raise pending.fault
        tensors = pending.reads.tensors(pending.block, shares_storage=self._loader.shares_storage)
        return pending.reads.row, tensors

    def _plan(self, rows: Iterable[IndexRow]) -> None:
        try:
            for row in rows:
                reads = self._loader.plan(row)
                block = self._room_for(reads)
                if block is None:
                    return
                tasks = self._loader.tasks(reads, block)
                pending = _Pending(reads, block, len(tasks))
                self._ordered.put(pending)
                for task in tasks:
                    self._tasks.put((pending, task))
                    del task
                del reads, block, pending, tasks  # the planner waits for room next, and must hold none itself
            self._ordered.put(None)
        except BaseException as fault:  # noqa: BLE001 - the loop raises it, in its place
            self._ordered.put(fault)

    def _room_for(self, reads: SampleReads) -> torch.Tensor | None:
        """Wait until there is room; None once closed."""
        wake = self._loader.wake
        while not self._is_closed.is_set():
            with suppress(Empty):
                while True:
                    wake.get_nowait()  # what came before the look that follows
            with self._lock:
                ahead = self._ahead
            if ahead == 0 or ahead + reads.block_bytes <= self._limit:
                block = self._loader.take(reads, must=ahead == 0)
                if block is not None:
                    with self._lock:
                        self._ahead += reads.block_bytes
                    return block
            with suppress(Empty):
                wake.get(timeout=_LONGEST_SLEEP_S)
        return None

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None and not self._is_closed.is_set():
            pending, task = item
            try:
                if pending.fault is None:
                    task()
                if pending.note_done() and pending.fault is None:
                    self._loader.finish(pending.reads, pending.block)
                    pending.is_ready.set()
            except BaseException as fault:  # noqa: BLE001 - the loop raises it, in its place
                pending.fail(fault)
            del item, pending, task  # they hold the sample's memory while this thread waits for the next
