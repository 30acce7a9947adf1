"""A disk that forgets, at a power cut, everything that was not synced: the worst that POSIX allows.

`Recorder` watches `os.fsync`. A synced file's content is kept under its inode, a synced folder's names under its own.
After any number of syncs the tree that would be found can be made anew: only names whose folder was synced since they
came, with the content that was synced last; a name without synced content is an empty file. What was removed without
a sync is back.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Names = dict[str, tuple[int, bool]]
"""Name -> (inode, whether it is a folder)."""


@dataclass
class Recorder:
    """What is durable below `root` after each sync."""

    root: Path
    events: list[tuple[int, bytes | Names]] = field(default_factory=list)
    """(inode, content or names) in the order of the syncs."""

    lock: threading.Lock = field(default_factory=threading.Lock)

    def synced(self, handle: int) -> None:
        """Note one fsync."""
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if not path.is_relative_to(self.root):
            return
        with self.lock:
            inode = os.fstat(handle).st_ino
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                self.events.append((inode, names_in(path)))
            else:
                self.events.append(
                    (inode, os.pread(handle, os.fstat(handle).st_size, 0) if readable(handle) else path.read_bytes())
                )

    def rebuild(self, num_syncs: int, target: Path) -> None:
        """Make the tree that a power cut right after `num_syncs` syncs leaves."""
        durable = dict(self.events[:num_syncs])
        target.mkdir()
        _rebuild(durable, self.root.stat().st_ino, target)


def readable(handle: int) -> bool:
    return os.O_WRONLY & int(Path(f"/proc/self/fdinfo/{handle}").read_text().split("flags:")[1].split()[0], 8) == 0


def names_in(folder: Path) -> Names:
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}


@contextmanager
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Record all syncs below `root`, an empty folder that is there for good."""
    recorder = Recorder(root)
    sync = os.fsync

    def fsync(handle: int) -> None:
        sync(handle)
        recorder.synced(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "fdatasync", fsync)
        yield recorder


def _rebuild(durable: dict[int, bytes | Names], inode: int, target: Path) -> None:
    names = durable.get(inode, {})
    assert isinstance(names, dict)
    for name, (child, is_folder) in names.items():
        if is_folder:
            (target / name).mkdir()
            _rebuild(durable, child, target / name)
            continue
        content = durable.get(child, b"")
        assert isinstance(content, bytes)
        (target / name).write_bytes(content)
