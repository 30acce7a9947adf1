"""Where the command starts and ends: the first thing that Python reads of it, so that Ctrl-C is in order from here on.

eaglehs ...   python -m eaglehs ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it: 128 + SIGINT."""


def main() -> NoReturn:
    """Run the command; its end is one message on stderr, if there is something to say, and an exit code."""
    message, exit_code = "interrupted", INTERRUPTED
    try:
        from .main import run

        message, exit_code = run()
        _ignore_ctrl_c()
    except KeyboardInterrupt:  # while modules were loaded, or while an earlier end was put into words
        _ignore_ctrl_c()
    _leave(message, exit_code)


def _ignore_ctrl_c() -> None:
    """All is put in order: one more could only tear the interpreter's own end, with a traceback."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(message: str, exit_code: int) -> NoReturn:
    sys.stderr.write(f"{message}\n" if message else "")
    sys.stderr.flush()
    if exit_code == INTERRUPTED:
        # A second Ctrl-C leaves a thread in a forward pass, and torch aborts if the interpreter ends under it. What is
        # on disk is safe at any moment: there is nothing to wait for.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
