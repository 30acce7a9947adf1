"""The free space of the disk that samples are kept on, watched while they come: a run stops before the disk is full."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.errors import StorageError

RESERVE_BYTES = 1 << 20
"""Left free for ledger, run.json, index and manifest, so that a stopped run can still say what it has."""

DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN})
"""Errors of the operating system that are the disk's and not a bug of ours; the last two are a network disk's that
went away."""


class DiskNearlyFullError(StorageError):
    """Samples that are under way would not fit any more."""

    def __init__(self, folder: Path, free_bytes: int, needed_bytes: int) -> None:
        """`needed_bytes` is what all samples under way and the next one take."""
        self.folder = folder
        self.free_bytes = free_bytes
        self.needed_bytes = needed_bytes
        super().__init__(
            f"the disk of {folder} has {counted(free_bytes, 'byte')} free; samples under way and the next one "
            f"need {needed_bytes:,} and a reserve of {RESERVE_BYTES:,}",
            why="The run was stopped in order before the disk was full, and what was under way is kept",
            mend="Free space and run the same command again: it goes on from here",
        )


def check_room(folder: Path, needed_bytes: int) -> None:
    """See that samples of `needed_bytes` can still be kept in `folder`.

    Raises:
        DiskNearlyFullError: they can't.
        StorageError: the folder is gone.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as fault:
        raise StorageError(
            f"the disk of {folder} can't be looked at: {fault.strerror}",
            why="The folder was removed or its disk went away; the run was stopped in order",
            mend="Bring it back and run the same command again",
        ) from None
    if free < needed_bytes + RESERVE_BYTES:
        raise DiskNearlyFullError(folder, free, needed_bytes)


def as_storage_error(fault: OSError, folder: Path) -> StorageError | None:
    """Return a full, read-only or broken disk in words; None for an error that is none of these."""
    if fault.errno not in DISK_FAULTS:
        return None
    return StorageError(
        f"{fault.filename or folder} can't be written: {fault.strerror}",
        why=free_there(folder),
        mend="Free space, or make it writable, and run the same command again: finished samples are kept",
    )


def free_there(folder: Path) -> str:
    """Return how much is free on the disk of `folder`, in words."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # it is gone
        free = 0
    return f"{counted(free, 'byte is', 'bytes are')} free there"
