"""Locks on files that end with the process that holds them, however it ends."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .atomic import make_folder
from .errors import StorageError, UsageError

LOCK_FILENAME = ".lock"


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
    try:
        make_folder(folder)
        lock = (folder / LOCK_FILENAME).open("wb")
    except OSError as fault:
        raise StorageError(f"the {kind} folder {folder} can't be written: {fault.strerror}") from None
    with lock:
        if not take_lock(lock.fileno(), folder):
            raise UsageError(f"another {holder} {folder}", mend="Wait for it, or give another --out")
        yield
