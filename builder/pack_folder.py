"""The dataset folder before and after a pack: whose it is, what may be replaced, what is in the way, is there room."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from ..schemas.atomic import sync_folder
from ..schemas.codec import read_record
from ..schemas.counts import counted
from ..schemas.errors import RecordError, StorageError, UsageError
from ..schemas.locks import LOCK_FILENAME
from ..schemas.manifest import DatasetFolder, Manifest
from ..schemas.sizes import format_size
from ..schemas.states import Codec
from .index_store import read_index_head
from .pack_state import Claim, PackState
from .pushed_shards import PushedShards


class ForeignFolderError(UsageError):
    """The folder holds what is not this run's to replace."""


class NoSpaceError(StorageError):
    """The shards do not fit on the disk."""


def open_folder(
    folder: DatasetFolder, state: PackState, run_id: str, names: Iterable[str], keep_parts: Collection[Path] = ()
) -> Claim:
    """Remove the part files of dead packs, but `keep_parts`, and claim the shard names that this one may write.

    Call it under the lock. Returns the claim over those names and all that earlier packs of the run claimed.

    Raises:
        ForeignFolderError: the folder is another run's, or holds files that no pack has written.
    """
    owned: set[str] = set()
    claim = state.read_claim()
    manifest = _read_manifest(folder)
    for owner, shards in (
        (claim.run_id if claim else run_id, claim.shards if claim else ()),
        (manifest.run_id if manifest else run_id, [entry.name for entry in manifest.shards] if manifest else ()),
    ):
        if owner != run_id:
            raise ForeignFolderError(
                f"{folder.root} holds a dataset of run {owner}, this is run {run_id}",
                mend="Give another folder with --out, or remove that one first",
            )
        owned.update(shards)
    if claim is None and manifest is None and folder.card.exists():
        raise ForeignFolderError(
            f"{folder.card} is no card of a dataset: no pack has written into {folder.root} yet",
            why="The dataset's card would take its place",
            mend="Give a folder of its own with --out, or move that file away",
        )
    _remove_parts(folder, state, keep_parts)
    _check_data_folder(folder, owned)
    new = Claim(run_id=run_id, shards=tuple(sorted(owned.union(names))))
    if new != claim:
        state.write_claim(new)
    return new


def is_finished(folder: DatasetFolder, manifest: Manifest) -> bool:
    """Tell whether the folder's manifest is `manifest`, its index is there, and no other shard is."""
    try:
        found = read_record(Manifest, folder.manifest)
        num_rows = read_index_head(folder.index).num_rows
    except RecordError:
        return False
    shards = {f"data/{path.name}" for path in folder.data.iterdir()}
    shards.update(note.name for note in PushedShards(folder).all_remote(found.shards))
    return found == manifest and num_rows == manifest.totals.num_samples and shards == {s.name for s in found.shards}


def clear_old(folder: DatasetFolder, state: PackState, claim: Claim, keep: Collection[str]) -> None:
    """Remove manifest and index, and of the claimed shards all but `keep`: the folder is no dataset until the end."""
    folder.manifest.unlink(missing_ok=True)
    folder.index.unlink(missing_ok=True)
    sync_folder(folder.root)
    for name in claim.shards:
        if name not in keep:
            state.forget(name)
            folder.shard(name).unlink(missing_ok=True)


def check_space(folder: DatasetFolder, needed_bytes: int) -> None:
    """Refuse to begin what the disk can't hold.

    Raises:
        NoSpaceError: with both numbers.
    """
    free_bytes = shutil.disk_usage(folder.root).free
    if needed_bytes > free_bytes:
        raise NoSpaceError(
            f"the shards need {counted(needed_bytes, 'byte')} ({format_size(needed_bytes)}), "
            f"{folder.root} has {counted(free_bytes, 'byte')} ({format_size(free_bytes)}) free",
            mend="Free space, or give a folder on another disk with --out",
        )


def recoding_bytes(sizes: Collection[int], codec: Codec, workers: int) -> int:
    """Return the room that plain shards of `sizes` take beside the coded ones that are made of them, one a worker."""
    return 0 if codec is Codec.PLAIN else sum(sorted(sizes)[-workers:])


def drop_if_empty(folder: DatasetFolder, *, existed: bool) -> None:
    """After a failed pack into a new folder: remove what it made, if no shard is among it."""
    if existed or any(folder.data.glob("*.tar")):
        return
    shutil.rmtree(folder.index.parent, ignore_errors=True)
    (folder.root / LOCK_FILENAME).unlink(missing_ok=True)
    for path in (folder.data, folder.root):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _read_manifest(folder: DatasetFolder) -> Manifest | None:
    if not folder.manifest.exists():
        return None
    try:
        return read_record(Manifest, folder.manifest)
    except RecordError as fault:
        raise ForeignFolderError(
            f"{folder.root} may hold another dataset: {fault}",
            mend="Give another folder with --out, or remove that file",
        ) from None


def _remove_parts(folder: DatasetFolder, state: PackState, keep: Collection[Path]) -> None:
    for place in (folder.root, folder.data, folder.index.parent, state.root):
        for part in set(place.glob(".*.part")).difference(keep):
            part.unlink()


def _check_data_folder(folder: DatasetFolder, owned: Collection[str]) -> None:
    foreign = [path for path in _visible(folder.data) if f"data/{path.name}" not in owned]
    if foreign:
        raise ForeignFolderError(
            f"{foreign[0]} was not written by a pack of this run ({counted(len(foreign), 'such file')})",
            why="The card's pattern would take it for part of the dataset",
            mend="Move it away, or give another folder with --out",
        )


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
