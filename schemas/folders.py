"""Folders that a user names: what to say of a path that is none."""

from __future__ import annotations

from pathlib import Path


def no_folder(path: Path) -> str:
    """Return what is at `path`, which is not a folder: a file, or nothing."""
    return f"{path} is a file, not a folder" if path.exists() else f"there is no folder {path}"
