"""What the command shows: data on stdout, everything else on stderr; a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, TextIO, cast

from .schemas import codec
from .schemas.counts import counted
from .schemas.errors import StorageError
from .schemas.progress import Progress
from .schemas.sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S = 10.0
"""Seconds between plain progress lines where no terminal is."""


class OutputError(StorageError):
    """Standard output took not all of the command's data: its disk is full, or it is closed (exit 4)."""

    def __init__(self, why: str) -> None:
        """Tell the system's reason, `why`."""
        super().__init__(
            "the result can't be written to standard output",
            why=why,
            mend="Send it to a place that takes it; files that the command writes are not concerned",
        )


class _Output:
    """Standard output whose refusals are told as OutputError, whoever writes: we, typer or rich."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._stream is None:  # as Python has it where the shell closed it: >&-
            raise OutputError("It is closed")
        try:
            return self._stream.write(text) if text != "" else 0  # typer tries so, and takes a refusal for an answer
        except OSError as fault:
            raise self._told(fault) from None

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as fault:
            raise self._told(fault) from None

    def _told(self, fault: OSError) -> OSError | OutputError:
        """Let the rest go nowhere, or the interpreter tries it once more at its end, with a traceback."""
        with suppress(OSError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        return fault if fault.errno == errno.EPIPE else OutputError(fault.strerror or str(fault))


@contextmanager
def told_output() -> Iterator[None]:
    """Tell what standard output refuses, also what Python still held at the end of the block.

    A reader that has gone, such as `head`, has seen what it wanted.

    Raises:
        OutputError: where it goes does not take it.
    """
    stream = sys.stdout
    output = sys.stdout = cast(TextIO, _Output(stream))
    try:
        yield
        with suppress(BrokenPipeError):
            output.flush()
    finally:
        sys.stdout = stream


def out(text: str) -> None:
    """Print a line of data."""
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """Print a line for people, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_json(record: Any) -> None:
    """Print one JSON document on stdout; `record` is a dataclass record or plain JSON types."""
    value = codec.encode(record) if is_dataclass(record) else record
    out(json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False))


@dataclass(slots=True)
class _Counts:
    num_samples: int = 0
    num_tokens: int = 0
    size_bytes: int = 0

    def rates(self, seconds: float) -> str:
        """Return `120 samples, 45.1k tokens (8.2k/s), 2.6 GB (0.47 GB/s)`, leaving out what stayed 0."""
        seconds = max(seconds, 1e-9)
        parts = [counted(self.num_samples, "sample")] if self.num_samples else []
        if self.num_tokens:
            parts.append(f"{counted(self.num_tokens, 'token')} ({self.num_tokens / seconds:,.0f}/s)")
        if self.size_bytes:
            parts.append(f"{format_size(self.size_bytes)} ({format_size(self.size_bytes / seconds)}/s)")
        return ", ".join(parts)


@contextmanager
def progress(
    title: str,
    *,
    total_samples: int | None = None,
    total_tokens: int | None = None,
    total_bytes: int | None = None,
) -> Iterator[Progress]:
    """Show how far work is, by the largest unit whose total is known: bytes, else tokens, else samples."""
    with _Bars() if sys.stderr.isatty() else _Lines() as shown:
        shown.begin(title, num_samples=total_samples or 0, num_tokens=total_tokens or 0, size_bytes=total_bytes or 0)
        yield shown


class _Meter:
    """Thread-safe counts of one stage after another, and the share of its total that a stage has done."""

    def __init__(self) -> None:
        self.title = ""
        self.totals = self.done = _Counts()
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, title: str, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        """Close the stage that was, and start the next from zero."""
        self.close()
        self.title = title
        self.totals = _Counts(num_samples, num_tokens, size_bytes)
        self.done = _Counts()
        self.started = time.monotonic()

    def advance(self, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        """Add what was finished since the last call."""
        with self._lock:
            self.done.num_samples += num_samples
            self.done.num_tokens += num_tokens
            self.done.size_bytes += size_bytes
            self.show()

    def show(self) -> None:
        """Draw; a subclass knows how."""

    def close(self) -> None:
        """Say how the stage ended."""

    def position(self) -> tuple[int, int]:
        """Return (done, total) in the unit that the share is measured in; total 0 where none is known."""
        for unit in ("size_bytes", "num_tokens", "num_samples"):
            if total := getattr(self.totals, unit):
                return getattr(self.done, unit), total
        return 0, 0

    def summary(self) -> str:
        """Return counts and rates so far."""
        return self.done.rates(time.monotonic() - self.started)


class _Lines(_Meter):
    """A line every ten seconds, for logs."""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, title: str, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        super().begin(title, num_samples=num_samples, num_tokens=num_tokens, size_bytes=size_bytes)
        self._last_line = self.started

    def close(self) -> None:
        if text := self.summary():
            say(f"{self.title}: {text} in {time.monotonic() - self.started:.1f} s")

    def show(self) -> None:
        if time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            done, total = self.position()
            share = f"{100 * done / total:.0f} %, " if total else ""
            say(f"{self.title}: {share}{self.summary()}")

    def note(self, message: str) -> None:
        """Print the message as a line of its own."""
        say(f"{self.title}: {message}")


class _Bars(_Meter):
    """A rich progress bar a stage, on stderr."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[counts]}"),
        )
        self._rich: RichProgress = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> _Bars:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._rich.stop()

    def begin(self, title: str, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        super().begin(title, num_samples=num_samples, num_tokens=num_tokens, size_bytes=size_bytes)
        self._task = self._rich.add_task(title, total=self.position()[1] or None, counts="")

    def close(self) -> None:
        self.show()
        if self._task is not None:
            self._rich.stop_task(self._task)

    def show(self) -> None:
        if self._task is not None:
            self._rich.update(self._task, completed=self.position()[0], counts=self.summary())

    def note(self, message: str) -> None:
        """Print the message above the bar."""
        self._rich.console.print(f"{self.title}: {message}", highlight=False, markup=False)
