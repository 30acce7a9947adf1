"""Ctrl-C and SIGTERM: the first one ends the work in order, the second one without waiting for what goes on in threads.

Ctrl-C   -> the main task is cancelled; threads bring what they do to its end (a sample that is being kept is kept)
again    -> nothing is waited for any longer
SIGTERM  -> as Ctrl-C
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 1.0
"""For cancelled tasks after a second Ctrl-C; they need no longer than a step of the loop, unless one of them hangs."""


class _Presses:
    """Counts Ctrl-C while an event loop runs, and passes each on to it between two of its steps."""

    def __init__(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
        self.number = 0
        self._loop = loop
        self._main = main

    def count(self, *_: object) -> None:
        self.number += 1

    def add(self) -> None:
        self.count()
        if self.number == 1:
            self._main.cancel()
        else:
            self._loop.stop()


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new event loop, as `asyncio.run` does, so that Ctrl-C tears no step of the loop.

    At a second Ctrl-C asyncio's own handler raises KeyboardInterrupt wherever the loop happens to be; a loop that was
    just about to stop can't be closed after that, and says so with a RuntimeError. Outside the main thread, where no
    signal arrives, this is `asyncio.run`.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; `main` has seen a CancelledError, if it was not done already.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)
    before = signal.getsignal(signal.SIGINT)
    loop = asyncio.new_event_loop()
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    loop.set_default_executor(threads)
    task = loop.create_task(main)
    presses = _Presses(loop, task)
    loop.add_signal_handler(signal.SIGINT, presses.add)
    try:
        with _as_interrupt(presses):
            return loop.run_until_complete(task)
    finally:
        try:
            with _as_interrupt(presses):
                _close(loop, presses, threads)
        finally:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _as_interrupt(presses: _Presses) -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of a block in which, or before which, Ctrl-C was pressed."""
    try:
        yield
    except (asyncio.CancelledError, RuntimeError):  # what `cancel` and `stop` come to
        if not presses.number:
            raise
    if presses.number:
        raise KeyboardInterrupt


def _close(loop: asyncio.AbstractEventLoop, presses: _Presses, threads: ThreadPoolExecutor) -> None:
    is_patient = presses.number < 2
    try:
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=None if is_patient else _PATIENCE_S))
        if is_patient:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(_ended(threads))
    finally:
        # The loop closes the pipe through which signals come to it before it lets go of them.
        signal.signal(signal.SIGINT, presses.count)
        signal.set_wakeup_fd(-1)
        loop.close()


async def _ended(threads: ThreadPoolExecutor) -> None:
    """Wait until all threads are done; the wait may be given up.

    asyncio's own `shutdown_default_executor`, given up, joins them after all, when its coroutine is collected: in any
    thread, and for ever where that one holds the lock that their end needs (seen in a thread that was just starting).
    """
    loop = asyncio.get_running_loop()
    is_done = asyncio.Event()

    def end() -> None:
        threads.shutdown()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(is_done.set)

    threading.Thread(target=end, daemon=True).start()
    await is_done.wait()


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the block in order, as Ctrl-C does. In the main thread only, elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell's script starts a program with `&`
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
