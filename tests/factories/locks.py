"""File systems whose locks are not those of a local disk."""

import errno
import fcntl
import os

import pytest


def lock_like_nfs(patch: pytest.MonkeyPatch) -> None:
    """Lock as NFS does: it locks a range of bytes, and answers EBADF for what is open for reading alone."""

    def nfs(handle: int, mode: int) -> None:
        is_writable = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if mode & fcntl.LOCK_EX and not is_writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(handle, mode)

    flock = fcntl.flock
    patch.setattr(fcntl, "flock", nfs)


def lock_like_lustre(patch: pytest.MonkeyPatch) -> None:
    """Lock as Lustre without the mount option flock: not at all."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    patch.setattr(fcntl, "flock", no_locks)
