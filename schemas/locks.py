"""Locks on files that end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
from pathlib import Path

from .errors import StorageError


def take_lock(handle: int, where: Path, *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed; False where another process holds it. `where` is the folder, for messages.

    Raises:
        StorageError: the file system has no locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as fault:
        raise StorageError(
            f"{where} can't be locked: {fault.strerror}",
            why="Its file system has no file locks, as Lustre without the mount option flock or NFS without its lock "
            "service; two processes could then write into the folder at once",
            mend="Give a folder on another file system, or have this one mounted with locks",
        ) from None
    return True
