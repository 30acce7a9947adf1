"""The command in a process of its own, as a user runs it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ENTRY = (sys.executable, "-c", "from eaglehs.__main__ import main; main()")
STARTED = "started"
"""A file in the working folder, there when Python has come to the first line of `main`."""

ENTRY_THAT_SAYS_SO = (
    sys.executable,
    "-c",
    f"from eaglehs.__main__ import main; open({STARTED!r}, 'w').close(); main()",
)
PLAIN = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}


def eaglehs(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `eaglehs` to its end."""
    command = [*ENTRY, *map(str, arguments)]
    env = {**os.environ, **PLAIN, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def start_eaglehs(*arguments: object, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `eaglehs` in a process group of its own, its output in `<cwd>/out.txt`; see STARTED."""
    with (cwd / "out.txt").open("a") as output:
        return subprocess.Popen(
            [*ENTRY_THAT_SAYS_SO, *map(str, arguments)],
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
