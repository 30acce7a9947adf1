"""Locks on files that end with the process that holds them, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .atomic import make_folder
from .errors import StorageError, UsageError

LOCK_FILENAME = ".lock"

TRIES = 5
"""At a lock file whose last holder removes it, with its folder, as it ends."""


class NotForReadersError(StorageError):
    """The file system gives no lock of one's own on what is open for reading alone: NFS, where a lock is a range's."""


def take_lock(handle: int, where: Path, *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed; False where another process holds it. `where` is the folder, for messages.

    Raises:
        NotForReadersError: a lock of one's own wants the file open for writing there.
        StorageError: the file system has no locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as fault:
        if fault.errno == errno.EBADF:
            raise NotForReadersError(f"{where} can't be locked: it is open for reading alone") from None
        raise StorageError(
            f"{where} can't be locked: {fault.strerror}",
            why="Its file system has no file locks, as Lustre without the mount option flock or NFS without its lock "
            "service; two processes could then write into the folder at once",
            mend="Give a folder on another file system, or have this one mounted with locks",
        ) from None
    return True


@contextmanager
def hold_folder(folder: Path, *, kind: str, holder: str) -> Iterator[None]:
    """Make a folder if needed and hold it; the kernel lets go of it however the process ends.

    `kind` is what errors call the folder, `holder` what another process that has it must be.

    Raises:
        UsageError: another process holds it.
        StorageError: the folder can't be made, written or locked.
    """
    with _taken(folder, kind, f"another {holder} {folder}"):
        yield


def is_at(handle: int, path: Path) -> bool:
    """Tell whether an open file is still under its name: its last holder may have removed it between open and lock."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _taken(folder: Path, kind: str, holder: str) -> BinaryIO:
    path = folder / LOCK_FILENAME
    for _ in range(TRIES):
        lock = _opened(path, kind)
        try:
            if not take_lock(lock.fileno(), folder):
                break
            if is_at(lock.fileno(), path):
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()
    lock.close()
    raise UsageError(holder, mend="Wait for it, or give another --out")


def _opened(path: Path, kind: str) -> BinaryIO:
    for left in reversed(range(TRIES)):
        try:
            make_folder(path.parent)
            return path.open("wb")
        except OSError as fault:
            if isinstance(fault, FileNotFoundError) and left:
                continue  # who held it before us has just removed the folder
            raise StorageError(f"the {kind} folder {path.parent} can't be written: {fault.strerror}") from None
    raise AssertionError("the last try returns or raises")
