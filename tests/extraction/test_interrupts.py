"""Ctrl-C at any step of an event loop ends it with a KeyboardInterrupt, and with nothing else."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CoroutineType

import pytest
from eaglehs.extraction.interrupts import run_interruptible, sigterm_as_interrupt


@contextmanager
def pressed(*whens: Callable[[], object]) -> Iterator[None]:
    """Press Ctrl-C whenever the next of these returns. Only a loop that runs heeds it: late ones must hit no test."""

    def press() -> None:
        for when in whens:
            when()
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: None)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


class Work:
    """A task that waits for its thread, and the thread for `may_end`; `ended` tells which came first."""

    def __init__(self) -> None:
        self.is_running, self.is_cancelled, self.may_end = threading.Event(), threading.Event(), threading.Event()
        self.ended: list[str] = []

    async def run(self) -> None:
        try:
            await asyncio.shield(asyncio.to_thread(self.run_in_thread))
        finally:
            self.ended.append("task")
            self.is_cancelled.set()

    def run_in_thread(self) -> None:
        self.is_running.set()
        self.may_end.wait(60)
        self.ended.append("thread")


def test_the_result_is_handed_on_and_so_is_a_fault():
    async def give(value: int) -> int:
        await asyncio.sleep(0)
        if value < 0:
            raise ValueError(value)
        return value

    assert run_interruptible(give(3)) == 3
    with pytest.raises(ValueError, match="-1"):
        run_interruptible(give(-1))


def test_one_ctrl_c_cancels_the_main_task_and_waits_for_its_threads():
    work = Work()
    work.may_end = work.is_cancelled
    with pressed(work.is_running.wait), pytest.raises(KeyboardInterrupt):
        run_interruptible(work.run())
    assert work.ended == ["task", "thread"]


def test_a_second_ctrl_c_waits_for_no_thread():
    work = Work()
    with pressed(work.is_running.wait, work.is_cancelled.wait), pytest.raises(KeyboardInterrupt):
        run_interruptible(work.run())
    assert work.ended == ["task"]
    work.may_end.set()
    # asyncio's own end of its threads, given up, would join them in whatever thread happens to collect it.
    assert "shutdown_default_executor" not in {o.__name__ for o in gc.get_objects() if type(o) is CoroutineType}


@pytest.mark.parametrize("first_s", [0, 0.003, 0.019, 0.02, 0.021])
def test_two_at_any_distance_end_with_a_keyboard_interrupt_and_leave_the_handler_as_it_was(first_s):
    async def workers() -> None:
        is_running.set()
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(asyncio.to_thread(time.sleep, 0.02))

    for step in range(12):
        is_running = threading.Event()
        first = lambda: is_running.wait() and time.sleep(first_s)  # noqa: B023, E731 - pressed in this turn
        with pressed(first, lambda: time.sleep(step * 0.002)):  # noqa: B023
            before = signal.getsignal(signal.SIGINT)
            with suppress(KeyboardInterrupt):
                run_interruptible(workers())
            assert signal.getsignal(signal.SIGINT) == before


def test_a_thread_without_signals_runs_it_plainly():
    got: list[int] = []

    async def give() -> int:
        return 5

    thread = threading.Thread(target=lambda: got.append(run_interruptible(give())))
    thread.start()
    thread.join()
    assert got == [5]


def test_sigterm_is_ctrl_c_inside_the_block_and_itself_again_after_it():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_ends_the_block_also_where_ctrl_c_is_ignored():
    """A shell's script starts a program with `&` so that Ctrl-C does not reach it; TERM must."""

    async def term() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
            run_interruptible(term())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
