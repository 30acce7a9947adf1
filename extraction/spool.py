"""How much of the spool may be full: fewer requests are sent when dumps under way and waiting would pass the bound.

Sizes are known before a request is sent: rows times bytes a row, and what `torch.save` adds to each dump. Nothing is
ever dropped; a prompt waits its turn, in order, so that small ones never starve a large one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.errors import StorageError

DUMP_OVERHEAD_BYTES = 8192
"""What a dump has beyond its rows: zip headers, the pickle, alignment; measured 4.1 kB with three layers."""

ROWS_A_CHUNK = 1024
"""Fewest rows that a prefill chunk of a long prompt is reckoned with; SGLang's default is 2048 and more."""


class SpoolTooSmallError(StorageError):
    """A prompt's dumps would not fit into the dump folder even alone."""

    def __init__(self, key: str, needed_bytes: int, free_bytes: int, folder: Path) -> None:
        """Name the prompt and both numbers."""
        self.key = key
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        super().__init__(
            f"{key} needs {counted(needed_bytes, 'byte')} of dumps, {counted(free_bytes, 'byte is', 'bytes are')} free "
            f"in the dump folder {folder}",
            why=f"{counted(needed_bytes - free_bytes, 'byte is', 'bytes are')} missing, "
            "with no other request under way",
            mend="Free space there, give a folder on a larger disk with --dump-dir, or cut prompts with --max-tokens",
        )


def dump_bytes(num_tokens: int, bytes_per_token: int) -> int:
    """Return the most bytes that the dumps of one prompt take in the spool."""
    num_dumps = 1 + num_tokens // ROWS_A_CHUNK
    return num_tokens * bytes_per_token + num_dumps * DUMP_OVERHEAD_BYTES


MAX_KEEPING = 8
"""Samples that may be checked and kept at once beside the requests under way; each takes a core and the disk."""


def num_workers(concurrency: int) -> int:
    """Return how many samples are in hand at once where `concurrency` requests are: the others are being kept."""
    return concurrency + min(concurrency, MAX_KEEPING)


def default_spool_bytes(sizes: Iterable[int], concurrency: int, free_bytes: int) -> int:
    """Return half of the free space, but no more than the largest prompts in hand at once need together."""
    return min(free_bytes // 2, sum(heapq.nlargest(num_workers(concurrency), sizes)))


class Spool:
    """The bytes that dumps take or will take, of all requests under way or waiting to be kept. For one event loop."""

    def __init__(self, limit_bytes: int | None, bytes_per_token: int) -> None:
        """None: no bound."""
        self.limit_bytes = limit_bytes
        self.bytes_per_token = bytes_per_token
        self.used_bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def room(self, num_tokens: int, admit: Callable[[int], Awaitable[None]] | None = None) -> AsyncIterator[None]:
        """Wait until the dumps of a prompt fit, hold their room in the block; one that never fits goes alone.

        `admit` is awaited in the prompt's turn, with its bytes, before they count as used: it may wait for more than
        the spool.
        """
        size = dump_bytes(num_tokens, self.bytes_per_token)
        async with self._turn:  # first come, first served
            while self.limit_bytes is not None and self.used_bytes and self.used_bytes + size > self.limit_bytes:
                self._freed.clear()
                await self._freed.wait()
            if admit is not None:
                await admit(size)
            self.used_bytes += size
        try:
            yield
        finally:
            self.used_bytes -= size
            self._freed.set()
