"""`capture.json`: how the plugin tells the client that it is hooked in, or why it has stopped.

One file a dump folder, though a data-parallel server has a process that writes dumps for each replica: it says `ready`
only while none of them has failed. A lock beside it keeps one from writing between another's look and write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..schemas.codec import read_record, write_record
from ..schemas.dump import CaptureStatus
from ..schemas.errors import RecordError, StorageError
from ..schemas.locks import take_lock

logger = logging.getLogger(__name__)

READY = "ready"
FAILED = "failed"

LOCK_FILENAME = f".{CaptureStatus.FILENAME}.lock"
"""A file of its own, open for writing: NFS locks no folder. It stays: removed, it would let two hold a lock."""

_TRIES = 5
_POLL_S = 0.01


class StatusFile:
    """Writes one process's status into the dump folder; `failed` is final, whichever process of the server says it."""

    def __init__(self, folder: Path, ready: CaptureStatus) -> None:
        """`ready` is what will be written by `say_ready`."""
        self.path = folder / CaptureStatus.FILENAME
        self._status = ready
        self._lock = threading.Lock()
        self._has_failed = False

    def say_ready(self) -> None:
        """Tell the client that dumps will come, unless another process of this server has failed.

        Raises:
            OSError: the folder can't be written to; then no dump could be either.
            StorageError: it can't be locked, so that a replica that fails might be overlooked.
        """
        with self._lock:
            if self._has_failed:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(self.path.parent):
                if not self._says_failed():
                    self._write(self._status)

    def say_failed(self, message: str) -> None:
        """Tell the client that no dump will come any more, and why. Only the first call counts. Never raises.

        On a full disk the writer has just removed its unfinished file, so that there is room for these few bytes;
        another writer may still take it, hence several tries. Where nothing helps the file is removed: a status that
        is gone is a failure to the client too. Where there are no locks it is written without: none says `ready` there.
        """
        with self._lock:
            if self._has_failed:
                return
            self._has_failed = True
            logger.error("Capture of hidden states has stopped; the server goes on. %s", message)
            failed = dataclasses.replace(self._status, state=FAILED, message=message, pid=os.getpid())
            for _ in range(_TRIES):
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.ExitStack() as stack:
                        with contextlib.suppress(StorageError):
                            stack.enter_context(_alone_in(self.path.parent))
                        self._write(failed)
                except OSError:
                    time.sleep(0.1)
                else:
                    return
            self._remove()

    def _says_failed(self) -> bool:
        try:
            return read_record(CaptureStatus, self.path).state == FAILED
        except (RecordError, OSError):
            return False  # there is none yet

    def _write(self, status: CaptureStatus) -> None:
        write_record(self.path, status)

    def _remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            logger.exception("%s can't be written nor removed: the client can't know that capture failed", self.path)


def forget_earlier_status(folder: Path) -> None:
    """Remove what an earlier server left; for the first process of a server, before any other says something."""
    with contextlib.suppress(OSError):
        (folder / CaptureStatus.FILENAME).unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes of the server from writing a status between our look and our write.

    Raises:
        OSError: the folder can't be written to.
        StorageError: its file system has no locks.
    """
    with (folder / LOCK_FILENAME).open("wb") as lock:
        while not take_lock(lock.fileno(), folder):
            time.sleep(_POLL_S)
        yield
