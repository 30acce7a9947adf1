"""What a way of doing a job takes in memory, beyond what was there before it began."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

_EVERY_S = 0.005


def peaks(ways: Mapping[str, Callable[[], int]], before: Callable[[], object]) -> dict[str, int]:
    """Run each way once in a fork of this process; return its peak of memory in bytes.

    `before` touches in each fork what the ways share, a training buffer. Pages count that the fork alone has written,
    anonymous or shared; those of files are the page cache's, mapped or not.
    """
    context = multiprocessing.get_context("fork")
    found = {}
    for name, way in ways.items():
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_measure, args=(way, before, theirs))
        child.start()
        theirs.close()
        found[name] = ours.recv()
        child.join()
    return found


def _measure(way: Callable[[], int], before: Callable[[], object], out: Connection) -> None:
    before()
    base, most, is_over = _written_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(_EVERY_S):
            most = max(most, _written_bytes() - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    way()
    is_over.set()
    watcher.join()
    out.send(most)


def _written_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
