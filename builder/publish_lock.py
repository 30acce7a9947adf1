"""One publisher a dataset folder, and none while it is packed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..schemas.errors import StorageError, UsageError
from ..schemas.locks import LOCK_FILENAME, NotForReadersError, take_lock


@contextmanager
def publishing(dataset: Path, *, holds_pack_lock: bool = False) -> Iterator[None]:
    """Hold a dataset folder for one publisher; works on a read-only disk, and ends with the process however it ends.

    `holds_pack_lock`: it is this process that packs into the folder.

    Raises:
        UsageError: another process publishes from the folder, or packs into it.
        StorageError: the folder can't be opened or locked.
    """
    others = f"another eaglehs is publishing {dataset}"
    with ExitStack() as open_files:
        folder = _open(dataset, os.O_RDONLY | os.O_DIRECTORY, open_files)
        try:
            _hold(folder, dataset, others)
        except NotForReadersError:  # NFS; the packers' lock is a file, and keeps publishers apart as well
            if not holds_pack_lock:
                pack = _open(dataset / LOCK_FILENAME, os.O_RDWR | os.O_CREAT, open_files)
                _hold(pack, dataset, f"{others} or packing into it")
        else:
            if not holds_pack_lock and (dataset / LOCK_FILENAME).exists():
                pack = _open(dataset / LOCK_FILENAME, os.O_RDONLY, open_files)
                _hold(pack, dataset, f"an eaglehs is packing into {dataset}", is_shared=True)
        yield


def _open(path: Path, flags: int, open_files: ExitStack) -> int:
    try:
        handle = os.open(path, flags | os.O_CLOEXEC, 0o644)
    except OSError as fault:
        raise StorageError(f"{path} can't be opened: {fault.strerror}") from None
    open_files.callback(os.close, handle)
    return handle


def _hold(handle: int, dataset: Path, what: str, *, is_shared: bool = False) -> None:
    if not take_lock(handle, dataset, is_shared=is_shared):
        raise UsageError(what, mend="Wait for it to end; what it has sent is not sent again")
