"""Files that are whole or absent: hidden sibling, flush, sync, rename, sync of the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def staged(final: Path, *, tag: str = "", durable: bool = True) -> Iterator[BinaryIO]:
    """Open a hidden sibling of `final` for writing; give it that name only if the block ends well.

    The sibling is `.<name>.<pid>.part`, or `.<name>.<pid>-<tag>.part` where several threads of a process may be at the
    same name at once. On an exception it is removed and nothing has the final name. Not `durable`: whole or absent to
    every other process, but not after a power cut; for files that nobody trusts after one.
    """
    part = part_path(final, tag=tag)
    try:
        with part.open("w+b") as out:
            yield out
            out.flush()
            if durable:
                os.fsync(out.fileno())  # a rename must not outlive its bytes after a power cut
        part.replace(final)
        if durable:
            sync_folder(final.parent)
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`; the name appears only when the bytes are on disk."""
    with staged(path) as out:
        out.write(content)


def part_path(final: Path, *, tag: str = "") -> Path:
    """Return the hidden name under which `final` is written by this process (and thread, if `tag` names one)."""
    writer = f"{os.getpid()}-{tag}" if tag else f"{os.getpid()}"
    return final.with_name(f".{final.name}.{writer}.part")


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable; a rename alone can be lost in a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder with its parents, and their names durable: what is synced in it must not be lost with it.

    Raises:
        OSError: it can't be made.
    """
    made = {folder, *(parent for parent in folder.parents if not parent.exists())}
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(made):  # `folder` always: who made it may have been killed before this
        with suppress(PermissionError):  # a parent that may be entered but not read, as of a mount point
            sync_folder(path.parent)


def append_durably(path: Path, line: str) -> None:
    """Append `line` and a newline to `path` and wait until they are on disk; on an OSError the file is as before.

    A line that a full disk cut would join with the next one, and both would be lost.
    """
    left = memoryview(line.encode() + b"\n")
    with path.open("ab", buffering=0) as out:
        before = out.tell()
        try:
            while left:
                left = left[out.write(left) :]
            os.fsync(out.fileno())
        except OSError:
            with suppress(OSError):
                out.truncate(before)
            raise
    if not before:
        sync_folder(path.parent)  # the file's name is new, too
