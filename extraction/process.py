"""A server's processes as one thing: started together, looked at together, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")

_KILL_PATIENCE_S = 20.0
"""How long the guard may take after the grace; a little more than its own patience with dying processes."""

_TAIL_BYTES = 65536
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All variables of the process, not only the added ones."""

    log: Path | None
    """Where its output goes; None: to stderr of this process."""

    grace_s: float = 20.0
    """Seconds between TERM and KILL."""

    secrets: Sequence[str] = ()
    """Values hidden in its output."""

    keep_open: Sequence[int] = ()
    """File descriptors, such as a lock, that stay open until the last process has ended."""


class ProcessGroup:
    """A program with all its children, under a guard (extraction/guard.py).

    It has a session of its own, so that Ctrl-C on the terminal reaches eaglehs alone, which then stops it in order.
    When eaglehs dies, however it dies, the guard stops the program.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        """Start the program.

        Raises:
            OSError: the log can't be opened.
        """
        self.log = spec.log
        self.grace_s = spec.grace_s
        lifeline, self._lifeline = os.pipe()
        log = spec.log.open("ab") if spec.log is not None else None
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(lifeline)],
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log if log is not None else _STDERR,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline, *spec.keep_open),
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
            if log is not None:
                log.close()
        order = {
            "argv": spec.argv,
            "secrets": list(spec.secrets),
            "grace_s": spec.grace_s,
            "eaglehs_pid": os.getpid(),
        }
        with contextlib.suppress(BrokenPipeError):  # a guard that could not start is noticed by the first `exit_code`
            os.write(self._lifeline, json.dumps(order).encode() + b"\n")

    @property
    def pid(self) -> int:
        """Process id of the guard, which is also the id of group and session."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, 128 + n after signal n; None while it runs."""
        return self._guard.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the program to end by itself and return its exit code, or None after `timeout_s`."""
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End all processes: TERM, then KILL after the grace. Returns when they are gone; a second call does nothing.

        Ctrl-C during the grace kills at once, and is raised again when the processes are gone.
        """
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            if self.wait(self.grace_s + _KILL_PATIENCE_S) is None:
                self._kill()
        except KeyboardInterrupt:
            self._guard.send_signal(signal.SIGINT)
            if self.wait(_KILL_PATIENCE_S) is None:
                self._kill()
            raise
        if self._guard.returncode < 0:  # the guard itself was killed and may have left something
            self._kill()

    def tail(self, num_lines: int = 15) -> str:
        """Return the last lines of the log; empty where there is none."""
        return tail_of(self.log, num_lines) if self.log is not None else ""

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._guard.wait()


def tail_of(path: Path, num_lines: int) -> str:
    """Return the last lines of a text file, at most 64 KiB of it; empty where it is missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])
