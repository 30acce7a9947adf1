"""A packed dataset, opened: its manifest and the place of every sample, checked against one another and the files.

Manifest, index and shards are separate files, and any of them may be lost, cut or copied from elsewhere. Each such
fault is named here, before the first sample; that the bytes themselves are right is for `eaglehs verify`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..schemas.codec import read_record
from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from ..schemas.index import IndexRow
from ..schemas.manifest import DatasetFolder, Manifest
from ..schemas.run import RUN_FILENAME
from ..schemas.states import ArraySpec, Codec, array_specs
from .hub_address import REPOSITORY
from .index_store import read_index
from .plan import DatasetLayout
from .pushed_shards import PushedShards
from .shard_head import scan_shard
from .shard_source import DatasetMismatchError


class MissingShardError(DataError):
    """The manifest lists a shard that is not there, or there is one that it does not list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """An opened dataset."""

    folder: DatasetFolder
    manifest: Manifest
    rows: tuple[IndexRow, ...]
    """All samples, in shard order."""

    fingerprint: str
    """xxh3_128 of manifest.json: another packing of the same samples has another."""

    written_at: Mapping[str, int] = field(default_factory=dict)
    """When each local shard was last written to, in ns, as it was found at opening."""

    def shard_path(self, row: IndexRow) -> Path:
        """Return the file that holds a sample."""
        return self.folder.shard(row.shard)


def open_catalog(dataset: str | Path, *, takes_remote: bool = False) -> Catalog:
    """Open the dataset in a local folder; with its index lost, the shards' headers are scanned instead.

    `takes_remote`: shards that can be read on the Hub need not be here; the caller reads by builder/sample_source.

    Raises:
        UsageError: no local folder, or no packed dataset in it.
        RecordError: manifest or index is damaged or of another version.
        ShardsOnHubError: shards were sent to the Hub and deleted here, and can't be taken from there.
        MissingShardError: a shard is missing, or one too many.
        DatasetMismatchError: manifest, index and shards do not belong together.
    """
    folder = DatasetFolder(_local_folder(dataset))
    if not folder.manifest.is_file():
        raise _no_dataset(folder)
    manifest = read_record(Manifest, folder.manifest)
    written_at = _check_shards(folder, manifest, takes_remote=takes_remote and folder.index.is_file())
    rows = tuple(read_index(folder.index)) if folder.index.is_file() else _scanned(folder, manifest)
    check_rows(rows, manifest, str(folder.root))
    fingerprint = xxhash.xxh3_128_hexdigest(folder.manifest.read_bytes())
    return Catalog(folder=folder, manifest=manifest, rows=rows, fingerprint=fingerprint, written_at=written_at)


def _local_folder(dataset: str | Path) -> Path:
    path = Path(dataset)
    if path.is_dir():
        return path
    text = str(dataset)
    if "://" in text or REPOSITORY.fullmatch(text):
        raise UsageError(
            f"{text} is no local folder, and this needs one; only eaglehs.stream, verify and inspect read elsewhere",
            mend="Bring it here first: hf download <org/name> --repo-type dataset --local-dir <folder>",
        )
    raise UsageError(f"{text} is no folder", mend="Give the folder that `eaglehs pack` wrote")


def _no_dataset(folder: DatasetFolder) -> UsageError:
    if (folder.root / RUN_FILENAME).is_file():
        return UsageError(f"{folder.root} is a run, not a dataset", mend=f"Pack it: eaglehs pack {folder.root}")
    return UsageError(
        f"{folder.root} holds no {folder.manifest.name}, so it is no packed dataset, or not a whole one",
        mend="Give the folder that `eaglehs pack` wrote; a copy of it must be complete",
    )


def _check_shards(folder: DatasetFolder, manifest: Manifest, *, takes_remote: bool) -> dict[str, int]:
    """Hold the files against the manifest, and return when each was last written to."""
    pushed = PushedShards(folder)
    remote = pushed.all_remote(manifest.shards)
    if remote and not (takes_remote and pushed.address(remote[0].repo)):
        raise pushed.error(remote)
    away = {note.name for note in remote}
    written_at = {}
    for entry in manifest.shards:
        if entry.name in away:
            continue
        path = folder.shard(entry.name)
        if not path.is_file():
            raise MissingShardError(
                f"{path} is missing; the manifest lists {counted(len(manifest.shards), 'shard')}",
                mend="Copy it here again",
            )
        stat = path.stat()
        size, written_at[entry.name] = stat.st_size, stat.st_mtime_ns
        if size != entry.size_bytes:
            raise DatasetMismatchError(
                f"{path} has {counted(size, 'byte')}, the manifest says {entry.size_bytes:,}",
                why="The file was cut on its way here, or is of another packing",
                mend="Copy it here again",
            )
    listed = {folder.shard(entry.name) for entry in manifest.shards}
    extra = sorted(set(folder.data.glob("*.tar")) - listed)
    if extra:
        raise MissingShardError(
            f"{extra[0]} is in the folder, but the manifest does not list it",
            why="Stock readers take every tar there and would mix in samples of another dataset",
            mend="Move it away",
        )
    return written_at


def _scanned(folder: DatasetFolder, manifest: Manifest) -> tuple[IndexRow, ...]:
    warnings.warn(
        f"{folder.index} is missing: the headers of "
        f"{counted(len(manifest.shards), 'shard is', 'shards are')} scanned instead, which is slower",
        stacklevel=4,
    )
    layout = DatasetLayout(layers=manifest.layers, hidden_size=manifest.model.hidden_size, codec=manifest.codec)
    names = [entry.name for entry in manifest.shards]
    return tuple(row for name in names for row in scan_shard(folder.shard(name), name=name, layout=layout))


def check_rows(rows: Sequence[IndexRow], manifest: Manifest, where: str) -> None:
    """Hold the index against the manifest; `where` names the dataset.

    Raises:
        DatasetMismatchError: they do not belong together.
    """
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        samples, tokens = found.get(row.shard, (0, 0))
        found[row.shard] = (samples + 1, tokens + row.num_tokens)
    expected = {entry.name: (entry.num_samples, entry.num_tokens) for entry in manifest.shards}
    for shard in (*expected, *found):
        if found.get(shard) != expected.get(shard):
            raise _mismatch(
                where,
                f"{shard} has {_counts(found.get(shard))} in the index, {_counts(expected.get(shard))} in the manifest",
            )
    sizes = {entry.name: entry.size_bytes for entry in manifest.shards}
    specs = array_specs(manifest.layers, manifest.model.hidden_size, manifest.codec)
    seen: set[str] = set()
    for row in rows:
        if row.key in seen:
            raise _mismatch(where, f"sample {row.key} stands twice in the index")
        seen.add(row.key)
        _check_row(row, specs, sizes[row.shard], where)


def _check_row(row: IndexRow, specs: Sequence[ArraySpec], shard_bytes: int, where: str) -> None:
    names = [spec.name for spec in specs]
    if list(row.arrays) != names:
        raise _mismatch(
            where, f"sample {row.key} has {', '.join(row.arrays)} in its shard, the manifest says {', '.join(names)}"
        )
    for spec in specs:
        place = row.arrays[spec.name]
        if row.num_tokens < 1 or place.length != row.num_tokens * spec.row_bytes:
            raise _mismatch(
                where,
                f"{spec.name} of sample {row.key} has {counted(place.length, 'byte')} for "
                f"{counted(row.num_tokens, 'token')}, {spec.row_bytes:,} a token by the manifest",
            )
        form = (Codec.PLAIN, spec.dtype, spec.width)
        if place.coded is not None:
            form = (place.coded.codec, place.coded.dtype, place.coded.width)
        if form != (spec.codec, spec.dtype, spec.width):
            raise _mismatch(
                where,
                f"{spec.name} of sample {row.key} is {form[0]} ({form[1]}, width {form[2]}) in the index, "
                f"{spec.codec} ({spec.dtype}, width {spec.width}) by the manifest",
            )
        if place.offset < 0 or place.offset % 64 or place.offset + place.stored_bytes > shard_bytes:
            raise _mismatch(where, f"{spec.name} of sample {row.key} at byte {place.offset} of {row.shard} can't be")


def _mismatch(where: str, what: str) -> DatasetMismatchError:
    return DatasetMismatchError(
        f"{where}: {what}",
        why="Manifest, index and shards are not of one dataset",
        mend="Copy the whole dataset again",
    )


def _counts(counts: tuple[int, int] | None) -> str:
    return "nothing" if counts is None else f"{counted(counts[0], 'sample')} of {counted(counts[1], 'token')}"
