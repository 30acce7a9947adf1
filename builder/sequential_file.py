"""Writes a file once from begin to end, past the page cache, and hashes it on the way.

    room / advance   the caller fills memory of a ring of buffers in place, so that nothing is copied twice
    buffer full      one thread hashes it (SHA-256, in order), others write it (O_DIRECT); then it is used again
    finish           the end is written, all is waited for; the hash of the whole file

Why past the page cache: a shard is written once and not read soon, and fresh pages are most of what a buffered write
costs; measured on ext4, CPU seconds a GB: 0.1 direct, 0.3 to 2.5 buffered. A file system that can't do it is written
buffered.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO, Self

from .write_out import begin_write_out

BUFFER_BYTES = 4 * 1024 * 1024
MOST_PER_FILE = 16
"""64 MiB a file under way: what SHA-256 hashes (1.8 GB/s a core) while the next sample of 100 MB is being checked."""

MOST_IN_ALL = 32
"""128 MiB, however many files are under way: with torch and pyarrow a pack stays under 500 MB."""

_ALIGNMENT = 4096
"""Of addresses, offsets and lengths under O_DIRECT; the largest logical block of today's disks."""

_NUM_WRITERS = 2
"""So that a disk always has the next buffer; more gained nothing."""

_BUFFERED_STEP_BYTES = 128 * 1024
"""As `cp` does: larger ones make the kernel look for large folios, at up to six times the cost."""

_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
_CANT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})

_UnderWay = tuple[memoryview, Future[None], Future[None]]


class BufferPool:
    """Memory for the files of one job, used again from file to file: touching fresh memory costs as much as writing it.

    Its methods may be called from any thread.
    """

    def __init__(self, num_files: int = 1) -> None:
        """`num_files` are under way at once, at most; nothing is taken from the system yet."""
        self.per_file = max(2, min(MOST_PER_FILE, MOST_IN_ALL // num_files))
        """Buffers that each of them may have: one is filled while others are hashed and written."""

        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a buffer of `BUFFER_BYTES`, with whatever was in it last."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, BUFFER_BYTES))

    def give_back(self, buffer: memoryview) -> None:
        """Take a buffer back that nobody uses any more."""
        self._free.append(buffer)


class SequentialFile:
    """One file under construction, for one thread; a context manager, whose end waits for its own threads."""

    def __init__(self, out: BinaryIO, buffers: BufferPool) -> None:
        """`out` is open for writing, and empty; the caller syncs and closes it."""
        self._buffers = buffers
        self._out = out.fileno()
        self._is_direct = _set_direct(self._out, wanted=True)
        self._sha256 = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="shard-hash")
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="shard-write")
        self._under_way: deque[_UnderWay] = deque()
        self._buffer: memoryview = memoryview(b"")
        self._filled = 0
        self._start = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that were taken so far: where the next will lie."""
        return self._start + self._filled

    def room(self, most: int) -> memoryview:
        """Return memory for the file's next bytes, at least one and at most `most`; `advance` says how many came.

        Raises:
            OSError: an earlier buffer could not be written.
        """
        if self._filled == len(self._buffer):
            self._send()
            self._buffer = self._next()
        return self._buffer[self._filled : self._filled + most]

    def advance(self, count: int) -> None:
        """Take the first `count` bytes of what `room` returned."""
        self._filled += count

    def write(self, content: bytes | memoryview) -> None:
        """Append `content`; errors as `room`."""
        left = memoryview(content).cast("B")
        while left:
            room = self.room(len(left))
            room[:] = left[: len(room)]
            self.advance(len(room))
            left = left[len(room) :]

    def zeros(self, count: int) -> None:
        """Append zeros; errors as `room`."""
        self.write(bytes(count))

    def finish(self) -> str:
        """Write what is left and return the SHA-256 of the file, in hex; nothing may be appended any more.

        Raises:
            OSError: a buffer could not be written.
        """
        size_bytes = self.size_bytes
        tail = -size_bytes % _ALIGNMENT if self._is_direct else 0
        if tail:  # buffers end at multiples of it, so this one has room
            self._buffer[self._filled : self._filled + tail] = bytes(tail)
        self._send(padding=tail)
        while self._under_way:
            self._buffers.give_back(self._wait())
        os.ftruncate(self._out, size_bytes)
        return self._sha256.hexdigest()

    def __enter__(self) -> Self:
        """The threads begin with the first buffer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None) -> None:
        """Give up what is not written yet, and wait: the caller closes the file next."""
        for pool in (self._hasher, self._writers):
            pool.shutdown(cancel_futures=True)
        for buffer in (*(buffer for buffer, _, _ in self._under_way), self._buffer):
            if buffer:
                self._buffers.give_back(buffer)
        if self._is_direct:
            _set_direct(self._out, wanted=False)

    def _send(self, *, padding: int = 0) -> None:
        """Hand over the buffer that is filled; `padding` bytes behind it are written, but not the file's."""
        if not self._filled:
            return
        taken, start = self._buffer[: self._filled], self._start
        hashed = self._hasher.submit(self._sha256.update, taken)
        written = self._writers.submit(self._write, self._buffer[: self._filled + padding], start)
        self._under_way.append((self._buffer, hashed, written))
        self._start, self._filled, self._buffer = start + self._filled, 0, memoryview(b"")

    def _next(self) -> memoryview:
        return self._wait() if len(self._under_way) == self._buffers.per_file else self._buffers.take()

    def _wait(self) -> memoryview:
        """Return the oldest buffer under way once it is hashed and written."""
        buffer, hashed, written = self._under_way.popleft()
        hashed.result()
        written.result()
        return buffer

    def _write(self, content: memoryview, start: int) -> None:
        done = 0
        while done < len(content):
            is_direct = self._is_direct  # another writer may be told first that it can't be
            end = len(content) if is_direct else done + _BUFFERED_STEP_BYTES
            try:
                done += os.pwrite(self._out, content[done:end], start + done)
            except OSError as fault:
                if not is_direct or fault.errno not in _CANT:
                    raise
                self._is_direct = _set_direct(self._out, wanted=False)
        if not self._is_direct:
            begin_write_out(self._out, start, len(content))


def _set_direct(handle: int, *, wanted: bool) -> bool:
    """Let writes to the open file pass the page cache, or no more; return whether they do."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
    except OSError as fault:
        if fault.errno not in _CANT:
            raise
        return False
    return wanted and _DIRECT != 0
