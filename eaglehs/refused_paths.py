"""Paths that the system refuses wherever they are touched: words for the command's last line.

Any question about a path can fail so, even whether it exists: a folder above it can't be entered, or a name is too
long. A file that is missing is not among these: whoever opens it knows what it is, and says so.
"""

from __future__ import annotations

import errno

from .schemas.errors import StorageError

_MENDS = {
    errno.EACCES: "Look at the rights of it and of the folders above it: namei -l",
    errno.EPERM: "Look at the rights of it and of the folders above it: namei -l",
    errno.EROFS: "Its file system is mounted read-only; give another folder",
    errno.ENAMETOOLONG: "Give a shorter name",
    errno.ELOOP: "A symbolic link there leads back to itself; mend it",
    errno.ENOTDIR: "A part of the way to it is a file; give another path",
    errno.ENOSPC: "Free space there, or give a folder on another disk",
    errno.EDQUOT: "The quota there is used up; free space, or give a folder on another disk",
    errno.EIO: "The disk fails; look into the system's log",
    errno.ESTALE: "The network's file system has lost it; mount it again",
    errno.ENODEV: "The file system there is gone; mount it again",
    errno.ENOTCONN: "The file system there is gone; mount it again",
}
_SHOWN_CHARS = 200


def refused_path(fault: OSError) -> StorageError | None:
    """Return what to tell of a path that the system refused; None where `fault` is of another kind."""
    mend = _MENDS.get(fault.errno or 0)
    if mend is None or fault.filename is None:
        return None
    name = str(fault.filename)
    shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}... ({len(name):,} characters)"
    return StorageError(f"{shown}: {fault.strerror}", mend=mend)
