"""Locks that one process holds at a time; the kernel lets go of them however it ends."""

from __future__ import annotations

import fcntl
from pathlib import Path

from .errors import StorageError, UsageError


def hold(handle: int, path: Path, busy: UsageError, *, is_shared: bool = False) -> None:
    """Lock the open file `handle`, until it is closed, or raise `busy` where another process has; never waits.

    Raises:
        UsageError: `busy`.
        StorageError: the file system of `path` has no locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError as fault:
        raise StorageError(
            f"{path} can't be locked: {fault.strerror}",
            why="Its file system is mounted without locks: Lustre without flock, or NFS without a lock server",
            mend="Mount it with them (Lustre: -o flock), or give a folder on another disk",
        ) from None
