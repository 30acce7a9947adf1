"""One publisher a dataset folder, and none while it is packed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..schemas.errors import StorageError, UsageError
from ..schemas.locks import take_lock
from .pack_state import LOCK_FILENAME


@contextmanager
def publishing(dataset: Path, *, holds_pack_lock: bool = False) -> Iterator[None]:
    """Hold a dataset folder for one publisher; works on a read-only disk, and ends with the process however it ends.

    `holds_pack_lock`: it is this process that packs into the folder.

    Raises:
        UsageError: another process publishes from the folder, or packs into it.
        StorageError: the folder can't be opened or locked.
    """
    try:
        folder = os.open(dataset, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as fault:
        raise StorageError(f"{dataset} can't be opened: {fault.strerror}") from None
    pack: int | None = None
    try:
        _hold(folder, dataset, f"another eaglehs is publishing {dataset}")
        if not holds_pack_lock and (dataset / LOCK_FILENAME).exists():
            pack = os.open(dataset / LOCK_FILENAME, os.O_RDONLY)
            _hold(pack, dataset, f"an eaglehs is packing into {dataset}", is_shared=True)
        yield
    finally:
        for handle in (folder, pack):
            if handle is not None:
                os.close(handle)


def _hold(handle: int, dataset: Path, what: str, *, is_shared: bool = False) -> None:
    if not take_lock(handle, dataset, is_shared=is_shared):
        raise UsageError(what, mend="Wait for it to end; what it has sent is not sent again")
