"""A range of a file as memory, without a descriptor kept open and without a way to change the file.

Python's own `mmap` keeps a duplicate of the descriptor for as long as the memory lives (before 3.13), so a list of a
thousand samples would run into the usual limit of 1,024 open files. The mapping here is private: writing to the memory
changes this process's copy of the page, never the file, and torch sees writable memory, about which it does not warn.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.errors import DataError, StorageError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on
_FLAGS = mmap.MAP_PRIVATE | _NORESERVE
"""No reserve: pages that nobody writes to cost no swap, so they are not counted as if they did."""
_POPULATE_READ, _WILLNEED = 22, 3
"""madvise: make pages present (Linux 5.14); begin to read them, for older kernels."""

_HWPOISON = 133  # Linux; Python does not name it


class ShardCutError(DataError):
    """A shard ends before the bytes that should be in it."""


def map_range(path: Path, offset: int, length: int) -> tuple[memoryview, int, Callable[[], object]]:
    """Return memory that shows `length` bytes of `path` from `offset`, where in it they begin, and what unmaps it.

    The memory begins at the page that holds `offset`, so the second value is `offset` modulo the page size. It is
    unmapped when nothing refers to the view, or to a tensor made of it, any more; or before, by a call of the third,
    whose caller knows that nobody looks at it.

    Raises:
        ShardCutError: the file is shorter; touching pages past its end would kill the process.
        StorageError: the file can't be opened or mapped.
    """
    start = offset - offset % mmap.PAGESIZE
    size = offset - start + length
    handle = open_to_read(path)
    try:
        check_holds(handle, path, offset + length)
        address = _libc.mmap(None, size, _PROTECTION, _FLAGS, handle, start)
    finally:
        os.close(handle)
    if address == _FAILED:
        raise StorageError(f"{path}: {counted(length, 'byte')} can't be mapped ({os.strerror(ctypes.get_errno())})")
    memory = (ctypes.c_uint8 * size).from_address(address)
    # The array, not the view, is what a tensor holds on to. At exit the kernel unmaps; a tensor may live until then.
    unmap = weakref.finalize(memory, _libc.munmap, address, size)
    unmap.atexit = False
    return memoryview(memory), offset - start, unmap


def map_populate(address: int, length: int, path: Path) -> None:
    """Make `length` bytes of a mapping of `path` present, in whole pages; other threads run meanwhile.

    Raises:
        ShardCutError: the file was cut after it was mapped; touching the pages would kill the process.
        StorageError: the disk can't give the bytes.
    """
    start = address - address % mmap.PAGESIZE
    size = address - start + length
    if _libc.madvise(start, size, _POPULATE_READ) == 0:
        return
    fault = ctypes.get_errno()
    if fault == errno.EFAULT:
        raise ShardCutError(f"{path}: it was cut while it was being read", mend="Copy the shard again")
    if fault in (errno.EIO, _HWPOISON):
        raise StorageError(f"{path}: {counted(length, 'byte')} can't be read ({os.strerror(fault)})")
    _libc.madvise(start, size, _WILLNEED)


def open_to_read(path: Path) -> int:
    """Return a descriptor of `path`, open for reading.

    Raises:
        StorageError: it can't be opened; the reason is named.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as fault:
        raise StorageError(f"{path} can't be opened: {fault.strerror}") from None


def read_range(handle: int, path: Path, offset: int, target: memoryview) -> None:
    """Fill `target` from byte `offset` of the open file `path`, with `preadv`, which lets other threads run.

    Raises:
        ShardCutError: the file ends first.
    """
    check_holds(handle, path, offset + len(target))
    while target:
        done = os.preadv(handle, [target], offset)
        if not done:
            check_holds(handle, path, offset + len(target))  # cut since the first look
        target, offset = target[done:], offset + done


def check_holds(handle: int, path: Path, end: int) -> None:
    """Refuse a file that ends before byte `end`.

    Raises:
        ShardCutError: it does.
    """
    size = os.fstat(handle).st_size
    if size < end:
        raise ShardCutError(
            f"{path}: {counted(size, 'byte')}, but data up to byte {end} should be in it",
            why="The file was cut after the dataset was opened, or its index is of another one",
            mend="Copy the shard again, then run `eaglehs verify` on the dataset",
        )
