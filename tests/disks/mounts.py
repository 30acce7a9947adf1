"""Small file systems of our own; they need root, and tests that use them are skipped without it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """Mount a tmpfs of `size` (`16m`) at `folder`, made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"can't mount a tmpfs (uid {os.getuid()}): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, *, leave_bytes: int) -> Path:
    """Take all but `leave_bytes` of the free space with one file, and return it."""
    ballast = folder / "ballast"
    stats = os.statvfs(folder)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, stats.f_bavail * stats.f_frsize - leave_bytes))
    return ballast
