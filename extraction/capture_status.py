"""`capture.json`: how the plugin tells the client that it is hooked in, or why it has stopped."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from pathlib import Path

from ..schemas.codec import write_record
from ..schemas.dump import CaptureStatus

logger = logging.getLogger(__name__)

READY = "ready"
FAILED = "failed"

_TRIES = 5


class StatusFile:
    """Writes one process's status into the dump folder; `failed` is final."""

    def __init__(self, folder: Path, ready: CaptureStatus) -> None:
        """`ready` is what will be written by `say_ready`."""
        self.path = folder / CaptureStatus.FILENAME
        self._status = ready
        self._lock = threading.Lock()
        self._has_failed = False

    def say_ready(self) -> None:
        """Tell the client that dumps will come.

        Raises:
            OSError: the folder can't be written to; then no dump could be either.
        """
        with self._lock:
            if not self._has_failed:
                self._write(self._status)

    def say_failed(self, message: str) -> None:
        """Tell the client that no dump will come any more, and why. Only the first call counts. Never raises.

        On a full disk the writer has just removed its unfinished file, so that there is room for these few bytes;
        another writer may still take it, hence several tries. Where nothing helps the file is removed: a status that
        is gone is a failure to the client too.
        """
        with self._lock:
            if self._has_failed:
                return
            self._has_failed = True
            logger.error("Capture of hidden states has stopped; the server goes on. %s", message)
            failed = dataclasses.replace(self._status, state=FAILED, message=message, pid=os.getpid())
            for _ in range(_TRIES):
                try:
                    self._write(failed)
                except OSError:
                    time.sleep(0.1)
                else:
                    return
            self._remove()

    def _write(self, status: CaptureStatus) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self.path, status)

    def _remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            logger.exception("%s can't be written nor removed: the client can't know that capture failed", self.path)
