"""The guard: a small process between eaglehs and the server, so that no server outlives the run that started it.

It is started as a plain script (`python -I -S guard.py FD`), leads a session of its own and imports nothing but the
standard library. FD is the read end of the lifeline, a pipe from eaglehs: the first line on it is a JSON object
`{"argv": [...], "secrets": [...], "grace_s": 20.0, "eaglehs_pid": 4711}`; then it stays open for as long as eaglehs
lives.

    server writes      -> the guard writes it on, secrets hidden: SGLang prints its API key at the start
    lifeline closes    -> TERM to the server; to all processes under it when it has ended or half of `grace_s` is over;
                          KILL after `grace_s`. Also when eaglehs was SIGKILLed
    server ends        -> the same for what it left behind, with a short grace; the guard ends with the server's code
    SIGINT to guard    -> KILL at once (a second Ctrl-C)

Processes are found by their parents in /proc, not by their group: the guard is the reaper of all orphans below it
(PR_SET_CHILD_SUBREAPER), so a daemon that left the group and session is found as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 0.1
_ORPHAN_GRACE_S = 2.0
"""For what a server leaves behind that has ended by itself."""

_KILL_PATIENCE_S = 15.0
"""A process that waits for a device may take a while to die even of KILL; then it is reported and left."""

_CHUNK_BYTES = 65536
_CHUNKS_AT_ONCE = 16
"""A server that prints without end fills the pipe faster than it is emptied: between so many one looks at the rest."""

_LINE_ENDS = re.compile(rb"(?<=[\r\n])")


class Guard:
    """Runs one server until it ends or the lifeline closes."""

    def __init__(self, lifeline: int, spec: dict[str, Any]) -> None:
        """Start the server; its output comes through a pipe."""
        self.lifeline = lifeline
        self.grace_s = float(spec["grace_s"])
        self.secrets = [secret.encode() for secret in spec["secrets"]]
        self.server = subprocess.Popen(
            spec["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - the guard has one thread
        )
        assert self.server.stdout is not None
        self.output = self.server.stdout.fileno()
        os.set_blocking(self.output, False)
        self.server_code: int | None = None
        self.is_hurried = False
        self.eaglehs_pid = int(spec["eaglehs_pid"])  # told, not looked up: it may have died since it said so
        self.rest = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.lifeline, selectors.EVENT_READ)
        self.selector.register(self.output, selectors.EVENT_READ)

    def run(self) -> int:
        """Wait for the end of the server or of eaglehs, stop what is left, and return the server's exit code."""
        is_cut = False
        while self.server_code is None and not is_cut:
            is_cut = self._wait_a_tick() or self.is_hurried
        self._stop_all(self.grace_s if self.server_code is None else _ORPHAN_GRACE_S)
        self._pump()
        self._write(self.rest)
        return 1 if self.server_code is None else self.server_code

    def hurry(self, *_: object) -> None:
        """Cut the grace short (SIGINT)."""
        self.is_hurried = True

    def _wait_a_tick(self) -> bool:
        """Pass output on for up to a tick; tell whether eaglehs has gone or asks for the end."""
        ready = {key.fd for key, _ in self.selector.select(_TICK_S)}
        if self.output in ready and not self._pump():
            self.selector.unregister(self.output)
        self._reap()
        # A forked worker of eaglehs may hold the pipe open after eaglehs itself was killed: look at the parent, too.
        return self.lifeline in ready or os.getppid() != self.eaglehs_pid

    def _stop_all(self, grace_s: float) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(self.lifeline)
        deadline = time.monotonic() + grace_s
        are_all_told = self.server_code is not None
        if are_all_told:
            _signal_all(signal.SIGTERM)
        else:  # it ends its own children in order; a scheduler that goes first looks like a crash to it
            os.kill(self.server.pid, signal.SIGTERM)
        while remaining := _descendants():
            now = time.monotonic()
            if now > deadline + _KILL_PATIENCE_S:
                self._write(f"eaglehs: processes {sorted(remaining)} do not die; they may hold the GPU\n".encode())
                return
            if now > deadline or self.is_hurried:
                deadline = min(deadline, now)
                _signal_all(signal.SIGKILL)
            elif not are_all_told and (self.server_code is not None or now > deadline - grace_s / 2):
                are_all_told = True
                _signal_all(signal.SIGTERM)
            time.sleep(_TICK_S / 2)
            self._pump()
            self._reap()

    def _reap(self) -> None:
        """Take the exit codes of the server and of every orphan that has come to the guard."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.server.pid:
                code = os.waitstatus_to_exitcode(status)
                self.server_code = code if code >= 0 else 128 - code

    def _pump(self) -> bool:
        """Pass on what the server has printed, up to a megabyte; return False at the end of its output."""
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                chunk = os.read(self.output, _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                return False
            *lines, self.rest = _LINE_ENDS.split(self.rest + chunk)
            self._write(b"".join(lines))
            if len(self.rest) > _CHUNK_BYTES:
                self._write(self.rest)
                self.rest = b""
        return True

    def _write(self, text: bytes) -> None:
        for secret in self.secrets:
            text = text.replace(secret, b"***")
        with contextlib.suppress(OSError):  # a full disk or a closed terminal must not stop the server
            while text:
                text = text[os.write(1, text) :]


def _descendants() -> set[int]:
    """Return all living processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            # "pid (name) state ppid ...": a name may hold blanks and brackets
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue.extend(below)
    return found


def _signal_all(number: int) -> None:
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _die_with_parent() -> None:
    """In the server, before exec: die when the guard is killed. SGLang's own children die with their parent so, too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_spec(lifeline: int) -> dict[str, Any]:
    text = b""
    while not text.endswith(b"\n"):
        chunk = os.read(lifeline, _CHUNK_BYTES)
        if not chunk:
            sys.exit(1)  # eaglehs has gone before it said what to start
        text += chunk
    spec: dict[str, Any] = json.loads(text)
    return spec


def main() -> int:
    """Run the guard."""
    lifeline = int(sys.argv[1])
    spec = _read_spec(lifeline)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(lifeline, spec)
    # Handlers and not SIG_IGN: an ignored signal would stay ignored in the server.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGINT, guard.hurry)
    return guard.run()


if __name__ == "__main__":
    sys.exit(main())
