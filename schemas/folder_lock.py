"""A folder held by one process at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .atomic import make_folder
from .errors import StorageError, UsageError

LOCK_FILENAME = ".lock"


@contextmanager
def hold_folder(folder: Path, *, kind: str, holder: str) -> Iterator[None]:
    """Make a folder if needed and hold it; the kernel lets go of it however the process ends.

    `kind` is what errors call the folder, `holder` what another process that has it must be.

    Raises:
        UsageError: another process holds it.
        StorageError: the folder can't be made or written.
    """
    try:
        make_folder(folder)
        lock = (folder / LOCK_FILENAME).open("wb")
    except OSError as fault:
        raise StorageError(f"the {kind} folder {folder} can't be written: {fault.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another {holder} {folder}", mend="Wait for it, or give another --out") from None
        yield
