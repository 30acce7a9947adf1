"""What of a dataset folder is published, and what the Hub would refuse of it, found before a byte is sent.

Shards stand in the manifest with their SHA-256, which is not computed again: what is sent is compared with it on the
way. All other files are small and hashed here. Names that begin with a dot are a pack's own notes and stay at home.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..schemas.errors import DataError
from ..schemas.manifest import DatasetFolder, Manifest
from ..schemas.sizes import format_size
from .hub_client import RemoteFile

MAX_FILE_BYTES = 50_000_000_000
"""The Hub's limit of a file; it suggests less than 20 GB."""

MAX_FOLDER_FILES = 10_000
"""The Hub's limit of entries in a folder."""


class UnpublishableError(DataError):
    """The Hub would refuse the dataset, late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file that belongs on the Hub."""

    name: str
    """Path in the repository, with slashes."""

    path: Path
    size_bytes: int
    sha256: str
    is_shard: bool
    """Whether the manifest lists it."""

    def is_at(self, remote: RemoteFile | None) -> bool:
        """Tell whether the Hub's file is this one, by SHA-256, or by git's hash where git itself keeps it."""
        if remote is None or remote.size_bytes != self.size_bytes:
            return False
        return remote.sha256 == self.sha256 if remote.sha256 else remote.git_oid == git_oid(self.path.read_bytes())


def git_oid(content: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def local_files(folder: DatasetFolder, manifest: Manifest) -> tuple[LocalFile, ...]:
    """Return the shards in the manifest's order, then all other files by name.

    Raises:
        UnpublishableError: the Hub would refuse one, or `datasets` the repository for it.
    """
    shards = [
        LocalFile(
            name=entry.name,
            path=folder.shard(entry.name),
            size_bytes=entry.size_bytes,
            sha256=entry.sha256,
            is_shard=True,
        )
        for entry in manifest.shards
    ]
    listed = {file.name for file in shards}
    files = (*shards, *_others(folder.root, listed))
    _check_limits(files)
    return files


def folder_counts(files: tuple[LocalFile, ...]) -> dict[str, int]:
    """Return folder -> number of files straight in it; `.` is the root."""
    return dict(sorted(Counter(str(PurePosixPath(file.name).parent) for file in files).items()))


def _others(root: Path, listed: set[str]) -> Iterator[LocalFile]:
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if name in listed or any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if len(relative.parts) == 1 and path.suffix == ".py":
            raise UnpublishableError(
                f"{path} is a Python file at the root",
                why="`datasets` refuses a repository that seems to have a loading script",
                mend="Move it away",
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        yield LocalFile(name=name, path=path, size_bytes=path.stat().st_size, sha256=digest, is_shard=False)


def _check_limits(files: tuple[LocalFile, ...]) -> None:
    for file in files:
        if file.size_bytes > MAX_FILE_BYTES:
            raise UnpublishableError(
                f"{file.name} has {file.size_bytes:,} bytes ({format_size(file.size_bytes)})",
                why=f"The Hub takes no file over {format_size(MAX_FILE_BYTES)}",
                mend="Pack again with a smaller --shard-size, such as 2GB",
            )
    for folder, count in folder_counts(files).items():
        if count > MAX_FOLDER_FILES:
            raise UnpublishableError(
                f"folder {folder} has {count:,} files",
                why=f"The Hub takes no more than {MAX_FOLDER_FILES:,} in one",
                mend="Pack again with a larger --shard-size",
            )
