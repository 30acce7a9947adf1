"""A run on disk while it is being made: opened or resumed, locked, and given finished samples one by one.

Order of a finished sample: its dumps are whole and synced under `run/dumps/`, then its ledger line is synced, then
the spool is freed. A kill between any two leaves files that no ledger line names; the next start removes them.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from ..schemas.atomic import make_folder, staged, sync_folder
from ..schemas.codec import read_record, write_record
from ..schemas.counts import counted
from ..schemas.errors import StorageError, UsageError
from ..schemas.keys import fan_out
from ..schemas.ledger import Ledger, LedgerEntry, SampleStatus, cut_torn_line
from ..schemas.locks import take_lock
from ..schemas.prompt import Prompt
from ..schemas.run import EngineFacts, RunFolder, RunRecord, check_same_run
from ..schemas.sample import CheckedSample
from .engines.protocol import Answer
from .prompt_store import write_prompts
from .room import free_there

TRIES_PER_START = 100
"""Attempt numbers that one start of a run may use: start s uses s * 100 and up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """What a start found out of order and put right."""

    orphan_files: int
    """Dumps that no ledger line names, removed."""

    lost_samples: int
    """Finished samples whose dumps or shard are gone or have another size; they are computed again."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run for one process; the kernel lets go of it whenever and however the process ends.

    Raises:
        UsageError: another process holds it.
        StorageError: the folder can't be made, written or locked.
    """
    try:
        make_folder(folder)
        lock = (folder / ".lock").open("wb")
    except OSError as fault:
        raise StorageError(f"the run folder {folder} can't be written: {fault.strerror}") from None
    with lock:
        if not take_lock(lock.fileno(), folder):
            raise UsageError(
                f"another eaglehs extract is writing to {folder}", mend="Wait for it, or give another --out"
            )
        yield


def new_run_id() -> str:
    """Return eight random hex digits."""
    return secrets.token_hex(4)


class RunStore:
    """The run of one locked folder; `finish` and `fail` may be called from any thread."""

    def __init__(self, folder: RunFolder, record: RunRecord) -> None:
        """Use `open_store` instead."""
        self.folder = folder
        self.record = record
        cut_torn_line(folder.ledger)
        self.ledger = Ledger(folder.ledger)
        self._lock = threading.Lock()
        self._folders: set[Path] = set()

    def begin(self, engine: EngineFacts) -> None:
        """Count one more start, by this engine; call it once before the first request."""
        self.record = replace(self.record, engine=engine, starts=self.record.starts + 1)
        write_record(self.folder.record, self.record)

    def pending(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return the prompts that are not finished; failed ones are tried again."""
        done = {entry.key for entry in self.ledger.finished()}
        return [prompt for prompt in prompts if prompt.key not in done]

    def attempt_number(self, num_tries: int) -> int:
        """Return the attempt number of the try after `num_tries` tries of this start."""
        return self.record.starts * TRIES_PER_START + num_tries

    def finish(self, prompt: Prompt, checked: CheckedSample, answer: Answer, attempt: int) -> LedgerEntry:
        """Keep a checked sample for good; its dumps leave the spool.

        Raises:
            StorageError: the disk is full or failed; the sample is not in the ledger.
        """
        target = self.folder.dump_path(prompt.key, "x").parent
        try:
            self._make_folder(target)
            for dump in answer.dumps:
                _move(dump, target / dump.name)
            sync_folder(target)
            entry = done_entry(prompt, checked, answer, attempt)
            self.append(entry)
        except OSError as fault:
            needed = sum(dump.size_bytes for dump in checked.dumps)
            raise StorageError(
                f"sample {prompt.key} ({counted(needed, 'byte')}) can't be kept in {self.folder.root}: "
                f"{fault.strerror}",
                why=free_there(self.folder.root),
                mend="Free space and run the same command again: finished samples are kept",
            ) from None
        return entry

    def _make_folder(self, folder: Path) -> None:
        """Make a folder for dumps; the first time in a start its own name is synced, too, whoever made it."""
        with self._lock:
            if folder not in self._folders:
                make_folder(folder)
                sync_folder(self.folder.root)
                self._folders.add(folder)

    def fail(self, prompt: Prompt, reason: str, attempt: int) -> None:
        """Record that a sample failed for good in this start."""
        entry = LedgerEntry(
            key=prompt.key,
            id=prompt.id,
            num_tokens=prompt.num_tokens,
            status=SampleStatus.FAILED,
            attempt=attempt,
            reason=reason,
            finished_at=round(time.time(), 3),
        )
        self.append(entry)

    def append(self, entry: LedgerEntry) -> None:
        """Add a ledger line; when this returns it is on disk.

        Raises:
            StorageError: the disk is full or failed.
        """
        try:
            with self._lock:
                self.ledger.append(entry)
        except OSError as fault:
            raise StorageError(
                f"the ledger {self.ledger.path} can't be written: {fault.strerror}",
                why=free_there(self.folder.root),
                mend="Free space and run the same command again: finished samples are kept",
            ) from None

    def repair(self, packed: Collection[str] = ()) -> Repairs:
        """Remove dumps that no finished sample owns, and forget finished samples whose dumps are not there.

        `packed` are the keys that the shards of the run's dataset hold. A sample that the ledger says is in a shard
        that does not hold it gets a line that says so: from then on the bytes at its place count for nothing.
        """
        there = dict(_files(self.folder.root / "dumps"))
        owned: set[tuple[str, str]] = set()
        lost: list[str] = []
        for entry in list(self.ledger.finished()):
            if entry.shard:
                if entry.key not in packed:
                    self.append(lost_entry(entry, f"{entry.shard} does not hold it any more"))
                    lost.append(entry.key)
                continue
            place = fan_out(entry.key)
            files = {(place, dump.name): dump.size_bytes for dump in entry.dumps}
            if all(there.get(name) == size for name, size in files.items()):
                owned.update(files)
            else:
                lost.append(entry.key)
        for key in lost:
            self.ledger.entries.pop(key)
        orphans = there.keys() - owned
        for place, name in orphans:
            (self.folder.root / "dumps" / place / name).unlink()
        return Repairs(orphan_files=len(orphans), lost_samples=len(lost))


def read_existing(folder: RunFolder, wanted: RunRecord) -> RunRecord | None:
    """Return the record of the run that is there, or None; `wanted` is what this start would make.

    Raises:
        UsageError: the run was made of other inputs; the field is named.
        RecordError: run.json can't be read.
    """
    if not folder.record.exists():
        return None
    found = read_record(RunRecord, folder.record)
    check_same_run(found, wanted, where=folder.root)
    return found


def open_store(folder: RunFolder, record: RunRecord, prompts: Sequence[Prompt]) -> RunStore:
    """Make a new run, or open the one that is there.

    The caller holds `locked(folder.root)`. run.json comes last: a folder without it is no run.
    """
    found = read_existing(folder, record)
    for part in folder.root.glob(".*.part"):  # half-written files of a start that was killed; the lock is ours
        part.unlink()
    if found is None:
        write_prompts(folder.prompts, prompts)
        write_record(folder.record, record)
    return RunStore(folder, found or record)


def done_entry(prompt: Prompt, checked: CheckedSample, answer: Answer, attempt: int) -> LedgerEntry:
    """Return the ledger line of a sample whose dumps are kept in the run."""
    return LedgerEntry(
        key=prompt.key,
        id=prompt.id,
        num_tokens=prompt.num_tokens,
        status=SampleStatus.DONE,
        attempt=attempt,
        next_token=answer.next_token,
        dumps=checked.dumps,
        state_norms=checked.state_norms,
        finished_at=round(time.time(), 3),
    )


def lost_entry(entry: LedgerEntry, reason: str) -> LedgerEntry:
    """Return the ledger line of a finished sample whose bytes are lost; it is computed again."""
    return replace(
        entry, status=SampleStatus.FAILED, reason=f"{entry.key}: {reason}", dumps=(), state_norms={}, shard=""
    )


def _files(dumps: Path) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield ((two-character folder, name), bytes) of all kept dumps; a scan is faster than a look at each."""
    for folder in dumps.iterdir() if dumps.is_dir() else ():
        if folder.is_dir():
            with os.scandir(folder) as entries:
                yield from (((folder.name, entry.name), entry.stat().st_size) for entry in entries)


def _move(source: Path, target: Path) -> None:
    with source.open("rb") as dump:
        if source.stat().st_dev == target.parent.stat().st_dev:
            os.fsync(dump.fileno())
            source.replace(target)
            return
        with staged(target) as out:
            _copy(dump, out)
    source.unlink()


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    left = os.fstat(source.fileno()).st_size
    while left:
        sent = os.sendfile(target.fileno(), source.fileno(), None, left)
        if not sent:
            raise OSError(5, f"{source.name} ended early while it was moved")
        left -= sent
