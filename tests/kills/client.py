"""`eaglehs` commands as processes that start in no time: forked from one that has imported everything.

Each is a process of its own that a signal can end at any moment; only the seconds of importing torch are saved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_PRELOAD = [
    "eaglehs.extract_run",
    "eaglehs.extraction.engines.sglang",
    "eaglehs.extraction.server",
    "eaglehs.builder.assemble",
    "eaglehs.builder.one_step",
    "eaglehs.builder.verify",
    "eaglehs.cards.write",
    "eaglehs.commands.registry",
    "transformers",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


@dataclass(frozen=True, slots=True)
class Command:
    """One `eaglehs` command that runs."""

    process: ForkServerProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, timeout_s: float = 240) -> int:
        """Wait for its end; return its exit code, -n after signal n."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"{self.output.read_text()}\nis still running after {timeout_s} s"
        return self.process.exitcode

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 240) -> bool:
        """Wait for something that the command does; return False if it has ended before."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if not self.process.is_alive():
                return False
            assert time.monotonic() < deadline, f"{self.output.read_text()}\ntook too long"
            time.sleep(0.002)
        return True


def start(*arguments: object, cwd: Path, environment: Mapping[str, str] | None = None) -> Command:
    """Start `eaglehs` with these arguments in the folder `cwd`; its output goes to `<cwd>/out.txt`."""
    output = cwd / "out.txt"
    output.touch()
    words = [str(argument) for argument in arguments]
    at_main, started = _context.Pipe(duplex=False)
    process = _context.Process(target=_main, args=(words, cwd, output, environment or {}, started))
    process.start()
    started.close()
    with contextlib.suppress(EOFError):  # it ended before; its exit code says so
        at_main.recv()
    return Command(process, output)


def run(*arguments: object, cwd: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run `eaglehs` to its end and return the exit code."""
    return start(*arguments, cwd=cwd, environment=environment).wait()


def _main(arguments: list[str], cwd: Path, output: Path, environment: Mapping[str, str], started: Connection) -> None:
    os.setsid()
    os.environ.update(environment)
    os.chdir(cwd)
    out = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = ["eaglehs", *arguments]
    from eaglehs.__main__ import main

    started.send(None)
    main()
