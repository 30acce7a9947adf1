"""What of a dataset folder is published, and what the Hub would refuse of it, found before a byte is sent.

Shards stand in the manifest with their SHA-256, which is not computed again: what is sent is compared with it on the
way. All other files are small and hashed here. Names that begin with a dot are a pack's own notes and stay at home.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..schemas.counts import counted
from ..schemas.errors import DataError
from ..schemas.manifest import DatasetFolder, Manifest, ShardEntry
from ..schemas.published import published_manifest
from ..schemas.sizes import format_size
from .hub_client import RemoteFile

MAX_FILE_BYTES = 50_000_000_000
"""The Hub's limit of a file; it suggests less than 20 GB."""

MAX_FOLDER_FILES = 10_000
"""The Hub's limit of entries in a folder."""

_SHOWN_CHARS = 200


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
        UnpublishableError: the Hub would refuse one.
    """
    for path in _other_paths(folder.root, {entry.name for entry in manifest.shards}):
        _check_size(path.name, path.stat().st_size)  # before it is read to be hashed
    shards = [shard_file(folder, entry) for entry in manifest.shards]
    listed = {file.name for file in shards}
    files = (*shards, *_others(folder.root, listed))
    check_limits(files)
    return files


def shard_file(folder: DatasetFolder, entry: ShardEntry) -> LocalFile:
    """Return a finished shard as the manifest has it, whether its file is here or not."""
    return LocalFile(
        name=entry.name,
        path=folder.shard(entry.name),
        size_bytes=entry.size_bytes,
        sha256=entry.sha256,
        is_shard=True,
    )


def check_told(folder: DatasetFolder, manifest: Manifest) -> None:
    """Refuse a manifest that tells strangers of the machine it was made on.

    Raises:
        UnpublishableError: names the field, with its value.
    """
    wanted = published_manifest(manifest)
    for what, told, publishable in (
        ("model", manifest.model.name, wanted.model.name),
        ("prompts", manifest.prompts.source, wanted.prompts.source),
        ("engine's command", " ".join(manifest.engine.command), " ".join(wanted.engine.command)),
        ("engine's environment", str(manifest.engine.environment), str(wanted.engine.environment)),
    ):
        if told != publishable:
            raise UnpublishableError(
                f"{folder.manifest} tells where its {what} lay on this machine: {told[:_SHOWN_CHARS]}",
                why="An earlier eaglehs wrote it, or somebody changed it",
                mend="Run the command that packed it again: it writes the manifest anew, and the shards stay",
            )


def folder_counts(files: Sequence[LocalFile]) -> dict[str, int]:
    """Return folder -> number of files straight in it; `.` is the root."""
    return dict(sorted(Counter(str(PurePosixPath(file.name).parent) for file in files).items()))


def check_limits(files: Sequence[LocalFile]) -> None:
    """Refuse files and folders that are too large for the Hub.

    Raises:
        UnpublishableError: with both numbers.
    """
    for file in files:
        _check_size(file.name, file.size_bytes)
    for folder, count in folder_counts(files).items():
        if count > MAX_FOLDER_FILES:
            raise UnpublishableError(
                f"folder {folder} has {counted(count, 'file')}",
                why=f"The Hub takes no more than {MAX_FOLDER_FILES:,} in one",
                mend="Pack again with a larger --shard-size",
            )


def _check_size(name: str, size_bytes: int) -> None:
    if size_bytes > MAX_FILE_BYTES:
        raise UnpublishableError(
            f"{name} has {counted(size_bytes, 'byte')} ({format_size(size_bytes)})",
            why=f"The Hub takes no file over {format_size(MAX_FILE_BYTES)}",
            mend="Pack again with a smaller --shard-size, such as 2GB",
        )


def _other_paths(root: Path, listed: Collection[str]) -> Iterator[Path]:
    """Yield the files that are no shards, sorted; hidden ones and those in hidden folders are left out."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if not is_hidden and relative.as_posix() not in listed and path.is_file():
            yield path


def _others(root: Path, listed: Collection[str]) -> Iterator[LocalFile]:
    for path in _other_paths(root, listed):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(root).as_posix()
        yield LocalFile(name=name, path=path, size_bytes=path.stat().st_size, sha256=digest, is_shard=False)
