"""The processes below a command, and whether they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

Process = tuple[int, str]
"""(pid, start time): a pid alone may be another process by now."""


def below(pid: int) -> list[Process]:
    """Return all processes below `pid`, parents first."""
    found, queue = [], [pid]
    while queue:
        children = []
        for task in Path(f"/proc/{queue.pop(0)}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += [int(child) for child in task.read_text().split()]
        found += children
        queue += children
    return [(child, start) for child in found if (start := start_of(child))]


def start_of(pid: int) -> str:
    """Return when a process was started, empty where there is none or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def title_of(pid: int) -> str:
    """Return the command line, which SGLang's processes set to their names; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_alive(process: Process) -> bool:
    return start_of(process[0]) == process[1]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal; one that comes too late is none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until_gone(processes: list[Process], timeout_s: float = 60) -> list[Process]:
    """Wait until the processes have ended; return those that have not."""
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
