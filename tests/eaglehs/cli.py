"""The command in a process of its own, as a user runs it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

ENTRY = (sys.executable, "-c", "from eaglehs.__main__ import main; main()")
STARTED = "started"
"""A file in the working folder, there when Python has come to the first line of `main`."""

ENTRY_THAT_SAYS_SO = (
    sys.executable,
    "-c",
    f"from eaglehs.__main__ import main; open({STARTED!r}, 'w').close(); main()",
)
GO = "go"
"""A file in the working folder that lets a run go on that HOLDING stopped."""

HOLDING = """
import os, pathlib, threading, time
from eaglehs.extraction.run_store import RunStore
append, lock, test = RunStore.append, threading.Lock(), os.getppid()
def hold(store, entry):
    with lock:
        while len(store.ledger.entries) >= {num_lines} and not pathlib.Path({go!r}).exists():
            time.sleep(0.01)
            os.getppid() == test or os._exit(1)
        append(store, entry)
RunStore.append = hold
"""
"""In the process of `extract`: a ledger of no more lines than these, so that it can't end before a test comes to it."""

NOTHING_TYPED = SimpleNamespace(get_parameter_source=lambda name: None)
"""The context of a command that a test calls as the function that it is."""

PLAIN = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}


def eaglehs(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `eaglehs` to its end."""
    command = [*ENTRY, *map(str, arguments)]
    env = {**os.environ, **PLAIN, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def start_eaglehs(
    *arguments: object, cwd: Path, holds_at: int | None = None, **environment: str
) -> subprocess.Popen[str]:
    """Start `eaglehs` in a process group of its own, its output in `<cwd>/out.txt`; see STARTED and HOLDING."""
    *python, program = ENTRY_THAT_SAYS_SO
    if holds_at is not None:
        program = HOLDING.format(num_lines=holds_at, go=GO) + program
    with (cwd / "out.txt").open("a") as output:
        return subprocess.Popen(
            [*python, program, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **PLAIN, **environment},
            stdout=output,
            stderr=output,
            text=True,
            process_group=0,
        )


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Wait for something that `process` does; fail if it ends or takes too long."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert process.poll() is None, f"ended early with {process.returncode}"
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


def ledger_lines(run: Path) -> Sequence[str]:
    """Return the lines of a run's ledger so far."""
    path = run / "ledger.jsonl"
    return path.read_text().splitlines() if path.exists() else []
