"""The dump folder (spool) of a server that we start: ours alone, empty at the start, left clean at the end.

It may be /dev/shm/eaglehs for every run of a machine, so it is locked while a server lives: the lock is held by
eaglehs and by the server's guard, and goes with the last of them. What an earlier run left there was never finished
(finished dumps are moved out before their ledger line is written), so it is removed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.dump import CaptureStatus, DumpName, DumpNameError
from ..schemas.errors import StorageError, UsageError
from ..schemas.locks import TRIES, is_at, take_lock
from .capture_status import LOCK_FILENAME as STATUS_LOCK

LOCK_FILENAME = ".eaglehs.lock"

DYING_PATIENCE_S = 45.0
"""After a run was killed, its server is being stopped by the guard, which holds the lock until it is gone."""

_POLL_S = 0.1
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the point of it; the folder in it is locked and checked


class DumpFolderInUseError(UsageError):
    """Another run's server writes into this dump folder."""

    def __init__(self, folder: Path, pid: str) -> None:
        """`pid` is the process that holds it, as it wrote it down."""
        self.folder = folder
        super().__init__(
            f"the dump folder {folder} is in use by process {pid or 'of another run'}",
            why="Two servers must not write into one folder",
            mend="Wait until it has ended, or give another --dump-dir",
        )


class ForeignFilesError(UsageError):
    """A dump folder holds files that eaglehs did not write."""

    def __init__(self, folder: Path, name: str, count: int) -> None:
        """`name` is the first of `count` files."""
        self.folder = folder
        super().__init__(
            f"the dump folder {folder} holds {counted(count, 'file that is no dump', 'files that are no dumps')}, "
            f"such as {name!r}",
            why="Everything in a dump folder may be removed",
            mend="Give an empty or new folder with --dump-dir",
        )


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """Make `folder` if needed, lock it, remove old dumps; yield the lock's descriptor. At the end remove ours again.

    The descriptor may be kept open by another process; the folder then stays locked until that one ends.

    Raises:
        DumpFolderInUseError, ForeignFilesError: the folder is not ours to use.
        StorageError: it can't be made or written to.
    """
    is_new = not folder.exists()
    lock = _lock(folder)
    try:
        clean(folder)
        try:
            yield lock
        finally:
            with contextlib.suppress(OSError, ForeignFilesError):
                clean(folder)
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK_FILENAME).unlink()
            if is_new:
                folder.rmdir()
        os.close(lock)


def clean(folder: Path, *, rid_prefix: str = "") -> int:
    """Remove dumps, half-written files and the status file; return how many files went.

    With `rid_prefix` only dumps of such requests go: a folder of a running server holds other things that are alive.

    Raises:
        ForeignFilesError: something else is there; nothing is removed.
    """
    entries = sorted(folder.iterdir())
    if rid_prefix:
        ours = [path for path in entries if is_dump(path.name) and path.name.startswith(rid_prefix)]
    else:
        ours = [path for path in entries if _is_ours(path.name)]
        if foreign := [path.name for path in entries if path not in ours and path.name != LOCK_FILENAME]:
            raise ForeignFilesError(folder, foreign[0], len(foreign))
    for path in ours:
        path.unlink(missing_ok=True)
    return len(ours)


def clean_after(folder: Path, rid_prefix: str) -> None:
    """Remove what a writer that has ended left of one run: its dumps and half-written files; the rest is not ours."""
    for path in folder.iterdir() if folder.is_dir() else ():
        is_part = path.name.startswith(f".{rid_prefix}") and path.name.endswith(".part")
        if is_part or (path.name.startswith(rid_prefix) and is_dump(path.name)):
            path.unlink(missing_ok=True)


def default_dump_dir() -> Path:
    """Return `eaglehs` in shared memory, or in the folder for temporary files where there is none."""
    return (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())) / "eaglehs"


def is_dump(filename: str) -> bool:
    """Tell whether a file name is a dump's."""
    try:
        DumpName.parse(filename)
    except DumpNameError:
        return False
    return True


def _is_ours(filename: str) -> bool:
    is_part = filename.startswith((".eh-", f".{CaptureStatus.FILENAME}.")) and filename.endswith(".part")
    return is_part or filename in {CaptureStatus.FILENAME, STATUS_LOCK} or is_dump(filename)


def _lock(folder: Path) -> int:
    deadline = time.monotonic() + DYING_PATIENCE_S
    while True:
        is_late = time.monotonic() > deadline  # before the look: we may stand still ourselves, and it be free by then
        lock = _open_lock(folder)
        try:
            is_taken = take_lock(lock, folder)
        except StorageError:
            os.close(lock)
            raise
        if is_taken and is_at(lock, folder / LOCK_FILENAME):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            return lock
        pid = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        if not is_taken and (is_late or _is_alive(pid)):
            raise DumpFolderInUseError(folder, pid)
        time.sleep(_POLL_S)


def _open_lock(folder: Path) -> int:
    for left in reversed(range(TRIES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / LOCK_FILENAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            if isinstance(fault, FileNotFoundError) and left:
                continue  # the last run has just removed the folder that it had made
            raise StorageError(
                f"the dump folder {folder} can't be made or written to: {fault.strerror}",
                mend="Give another one with --dump-dir",
            ) from None
    raise AssertionError("the last try returns or raises")


def _is_alive(pid: str) -> bool:
    return pid.isdecimal() and Path("/proc", pid).exists()
