"""Ledger: `run/ledger.jsonl`, append-only, a line for each sample that is finished or has failed. Format version 1.

A sample is finished when its dumps lie under `run/dumps/`, or its bytes in a shard (`shard` names it), and its line is
on disk, in that order. Resume trusts the ledger and the files that it names, never a file's mere existence. The last
line for a key counts: a failed sample that a later run finishes has two lines. A last line without a newline is what a
kill left: it is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from . import codec
from .atomic import append_durably
from .ledger_entries import LedgerEntries
from .sample import NO_NEXT_TOKEN, DumpRef

LEDGER_FILENAME = "ledger.jsonl"


class SampleStatus(StrEnum):
    """How a sample ended."""

    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One line of the ledger."""

    KIND: ClassVar[str] = "eaglehs.ledger"
    VERSION: ClassVar[int] = 1

    key: str
    id: str
    num_tokens: int
    status: SampleStatus
    attempt: int
    """Attempts used, counted from 0; the last part of the request id whose dumps were kept."""

    reason: str = ""
    """Why it failed; empty when done."""

    next_token: int = NO_NEXT_TOKEN
    """The engine's answer after the last row; -1 where it gave none."""

    dumps: tuple[DumpRef, ...] = ()
    """Where `shard` is empty they lie in the run; else they are gone, and this is what they were."""

    state_norms: dict[str, float] = field(default_factory=dict)
    shard: str = ""
    """The shard of the run's dataset that holds the sample (`data/train-00000.tar`, or its part file); empty in a run
    that keeps its dumps."""

    finished_at: float = 0.0
    """Seconds since 1970; 0 where it was not kept."""


class Ledger:
    """The ledger of one run: read once, then appended to by one process."""

    def __init__(self, path: Path) -> None:
        """Read `path` if it is there.

        Raises:
            RecordError: a line other than a cut last one is no ledger line.
        """
        self.path = path
        self.entries = read_entries(path)

    def append(self, entry: LedgerEntry) -> None:
        """Add a line; when this returns it is on disk."""
        append_durably(self.path, codec.dumps(entry))
        self.entries[entry.key] = entry

    def finished(self) -> Iterator[LedgerEntry]:
        """Yield the last entry of each key that is done."""
        return (entry for entry in self.entries.values() if entry.status is SampleStatus.DONE)

    def failed(self) -> Iterator[LedgerEntry]:
        """Yield the last entry of each key that has failed."""
        return (entry for entry in self.entries.values() if entry.status is SampleStatus.FAILED)


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield the entries of a ledger in order; a cut last line is left out, a missing file is empty.

    Raises:
        RecordError: another line can't be read; it is named with its number.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            yield codec.loads(LedgerEntry, line.decode("utf-8", "replace"), where=f"{path}:{number}")


def read_entries(path: Path) -> LedgerEntries:
    """Return the last entry of each key.

    Raises:
        RecordError: as `read_ledger`.
    """
    entries = LedgerEntries()
    for entry in read_ledger(path):
        entries[entry.key] = entry
    return entries


def cut_torn_line(path: Path) -> int:
    """Cut a last line without a newline off the ledger, and return its bytes; 0 where there is none."""
    if not path.exists():
        return 0
    with path.open("r+b") as ledger:
        content = ledger.read()
        whole = content.rfind(b"\n") + 1
        ledger.truncate(whole)
    return len(content) - whole
