"""Work in threads: all results in order, or the first failure and nothing begun after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from eaglehs.builder.side_by_side import StoppedError, side_by_side


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_the_order_of_the_items(threads: int) -> None:
    assert side_by_side(lambda item, _: item * item, range(20), threads=threads, name="t") == [n * n for n in range(20)]


def test_nothing_is_begun_after_the_first_failure() -> None:
    begun: list[int] = []

    def task(item: int, _: threading.Event) -> None:
        begun.append(item)
        if item == 2:
            raise OSError("full")

    for _ in range(200):  # the main thread is seldom late enough to let another one begin
        begun.clear()
        with pytest.raises(OSError, match="full"):
            side_by_side(task, range(9), threads=1, name="t")
        assert begun == [0, 1, 2]


def test_the_failure_is_raised_not_that_others_were_stopped_by_it() -> None:
    both = threading.Barrier(2)

    def task(item: int, stop: threading.Event) -> None:
        both.wait()
        if item == 0:
            raise OSError("full")
        stop.wait()
        raise StoppedError

    for _ in range(50):
        with pytest.raises(OSError, match="full"):
            side_by_side(task, range(2), threads=2, name="t")


def test_ctrl_c_stops_the_threads_and_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def task(item: int, stop: threading.Event) -> None:
        begun.set()
        stop.wait()
        ended.set()
        raise StoppedError

    def pressed(_: object) -> None:
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("eaglehs.builder.side_by_side.as_completed", pressed)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(task, range(2), threads=1, name="t")
    assert ended.is_set()


def test_ctrl_c_before_all_work_is_handed_over_stops_what_is_begun() -> None:
    told: list[bool] = []

    def task(_: int, stop: threading.Event) -> None:
        told.append(stop.wait(60))
        raise StoppedError

    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(task, items(), threads=1, name="t")
    assert told in ([], [True])
