"""One look at the dump folder for all requests under way, every few milliseconds; none while nothing is awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.dump import DumpName, DumpNameError
from ..schemas.errors import StorageError
from .rows import RowsOf

POLL_S = 0.015


@dataclass(slots=True)
class _Awaited:
    rows: RowsOf
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the rows are whole, or can't become so."""


class DumpWatcher:
    """Tells the requests of one run which of their dumps have come. For one event loop.

    A dump of this run that nobody awaits is removed: it belongs to a request that was given up or cut off, or holds
    a decode step, and would fill the folder for good.
    """

    def __init__(self, folder: Path, rid_prefix: str) -> None:
        """Watch `folder` for dumps of requests whose id starts with `rid_prefix`."""
        self.folder = folder
        self.rid_prefix = rid_prefix
        self.moved_at = 0.0
        """When a new dump was last seen, by the monotonic clock."""
        self._awaited: dict[str, _Awaited] = {}
        self._seen: set[str] = set()
        self._fault: OSError | None = None
        self._poller: asyncio.Task[None] | None = None

    def expect(self, rid: str, num_tokens: int) -> RowsOf:
        """Await the dumps of a request; call it before the request is sent. The rows fill up as dumps come."""
        awaited = _Awaited(RowsOf(rid=rid, num_tokens=num_tokens))
        self._awaited[rid] = awaited
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        return awaited.rows

    async def wait(self, rid: str, timeout_s: float) -> bool:
        """Wait until the rows of `rid` are whole or have a fault; return False after `timeout_s`.

        Raises:
            StorageError: the folder can't be read any more.
        """
        awaited = self._awaited[rid]
        if awaited.is_settled.is_set():
            self._look()  # rows that came twice before the answer are refused, however soon it came
        try:
            await asyncio.wait_for(awaited.is_settled.wait(), timeout_s)
        except TimeoutError:
            self._look()  # what came while the loop stood still is there, whether the poller has seen it or not
            if not awaited.is_settled.is_set():
                return False
        if self._fault is not None:
            raise StorageError(f"the dump folder {self.folder} can't be read: {self._fault.strerror}") from None
        return True

    def release(self, rid: str) -> None:
        """Stop awaiting a request; its dumps are left to the caller."""
        self._awaited.pop(rid, None)

    def discard(self, rid: str) -> None:
        """Stop awaiting a request and remove its dumps, also those that come later."""
        awaited = self._awaited.pop(rid, None)
        for name in awaited.rows.names if awaited else ():
            (self.folder / name.filename).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.scan()  # those that have come since the last look

    def scan(self) -> None:
        """Look once: hand new dumps to those who await them, remove the rest of this run's.

        Raises:
            OSError: the folder can't be read.
        """
        with os.scandir(self.folder) as entries:
            found = {entry.name for entry in entries if entry.name.startswith(self.rid_prefix)}
        new = found - self._seen
        self._seen = found
        if new:
            self.moved_at = time.monotonic()
        for filename in new:
            self._take(filename)

    def _take(self, filename: str) -> None:
        try:
            name = DumpName.parse(filename)
        except DumpNameError:
            return
        awaited = self._awaited.get(name.rid)
        if awaited is None or not awaited.rows.add(name):
            (self.folder / filename).unlink(missing_ok=True)
        elif awaited.rows.is_whole or awaited.rows.fault:
            awaited.is_settled.set()

    async def _poll(self) -> None:
        while self._awaited:
            if not self._look():
                return
            await asyncio.sleep(POLL_S)

    def _look(self) -> bool:
        """Scan; tell whether the folder can still be read."""
        try:
            self.scan()
        except OSError as fault:
            self._fault = fault
            for awaited in self._awaited.values():
                awaited.is_settled.set()
        return self._fault is None
