"""The hidden file in which a shard fills up while its samples are still being extracted, and what is in it.

    data/.train-00000.tar.part    laid out by the plan over all prompts of the run; unwritten places read as zeros;
                                  plain, whatever the codec of the finished shard

Its name is always the same, so that a resumed run takes it up again. The ledger says which samples are in it; that
their `meta.json` can be read at their place shows that it is that file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from ..schemas.atomic import staged, sync_folder
from ..schemas.codec import loads
from ..schemas.errors import DataError
from ..schemas.index import IndexRow
from ..schemas.manifest import DatasetFolder
from ..schemas.sample import SampleMeta
from ..schemas.states import Codec
from .file_scan import read_blocks
from .index_rows import index_row, meta_of
from .plan import META, PlacedSample, ShardPlan
from .planes_read import CodedRows, file_state
from .shard_head import scan_shard
from .tar_writer import FileRange, Piece, ShardWriter


class WrittenBytesError(DataError):
    """An array in a shard is not the one that was checked."""


class ShardParts:
    """The part files of one dataset folder; its methods may be called from any thread."""

    def __init__(self, folder: DatasetFolder, codec: Codec = Codec.PLAIN) -> None:
        """Nothing is read or made yet; `codec` is that of finished shards."""
        self._folder = folder
        self._codec = codec
        self._lock = threading.Lock()

    def path(self, shard: ShardPlan) -> Path:
        """Return the name under which a shard fills up."""
        return part_of(self._folder.shard(shard.name))

    @contextmanager
    def opened(self, shard: ShardPlan) -> Iterator[BinaryIO]:
        """Open the part of `shard`, made first if it is not there; a finished shard is turned back into its part.

        Raises:
            OSError: the disk is full or failed.
            DataError: the finished shard is damaged.
        """
        part, final = self.path(shard), self._folder.shard(shard.name)
        with self._lock:
            if not part.exists():
                self._make(shard, part, final)
        with part.open("r+b") as file:
            yield file

    def take_up(self, shard: ShardPlan, keys: Iterable[str]) -> set[str]:
        """Return those of `keys` that the part, or the shard under its own name, holds.

        A part of another size, or a shard that can't be read, is removed: the disk has lost what was in it.
        """
        part, final = self.path(shard), self._folder.shard(shard.name)
        if part.exists() and part.stat().st_size != shard.size_bytes:
            part.unlink()
        try:
            if not part.exists() and not final.exists():
                return set()
            wanted = set(keys)
            with self.opened(shard) as file:
                placed = [placed for placed in shard.samples if placed.key in wanted]
                return {sample.key for sample in placed if read_meta(file, sample) is not None}
        except DataError:
            final.unlink()
            return set()

    def _make(self, shard: ShardPlan, part: Path, final: Path) -> None:
        part.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            layout = replace(shard.layout, codec=self._codec)
            rows = list(scan_shard(final, name=shard.name, layout=layout))
            if len(rows) == len(shard.samples) and not layout.is_coded:
                final.replace(part)
            else:
                with final.open("rb") as source, staged(part) as out:
                    copy_samples(source, rows, out, shard)
                final.unlink()
        else:
            with staged(part) as out:
                ShardWriter(out, shard)
        sync_folder(part.parent)


def part_of(final: Path) -> Path:
    """Return the hidden name of the shard file `final` while it fills."""
    return final.with_name(f".{final.name}.part")


def read_meta(file: BinaryIO, placed: PlacedSample) -> SampleMeta | None:
    """Return the `meta.json` at the place of a sample, or None where another or none is."""
    member = placed.members[0]
    content = os.pread(file.fileno(), member.data_bytes, member.data_offset)
    try:
        meta = loads(SampleMeta, content.decode("utf-8", "surrogatepass"), where=f"{file.name}: {member.name}")
    except (DataError, UnicodeDecodeError):
        return None
    return meta if (meta.key, meta.num_tokens) == (placed.key, placed.sample.num_tokens) else None


def check_written(path: Path, handle: int, placed: PlacedSample, xxh3_128: Mapping[str, str]) -> None:
    """Read the arrays of one sample back from their place.

    Raises:
        WrittenBytesError: an array has another hash.
        FileCutError: the file ends first.
    """
    for member in placed.members:
        if member.array == META:
            continue
        if array_hash(path, handle, member.data_offset, member.data_bytes) != xxh3_128[member.array]:
            raise WrittenBytesError(
                f"{placed.key}: {member.array} in {path} has other bytes than were checked",
                why="A dump was changed while it was packed, or the disk is failing",
            )


def array_hash(path: Path, handle: int, offset: int, length: int) -> str:
    """Return the xxh3_128 of a range of an open file.

    Raises:
        FileCutError: the file ends first.
    """
    digest = xxhash.xxh3_128()
    for block in read_blocks(path, handle, offset, length):
        digest.update(block)
    return digest.hexdigest()


def stored_hash(path: Path, handle: int, row: IndexRow, name: str) -> str:
    """Return the xxh3_128 of an array of an open shard, decoded.

    Raises:
        FileCutError: the file ends first.
        CodedBlockError, PlanesHeadError: a coded state is damaged.
    """
    place = row.arrays[name]
    if place.coded is None:
        return array_hash(path, handle, place.offset, place.length)
    digest = xxhash.xxh3_128()
    for _, rows in CodedRows(file_state(path, handle, row, name), row.num_tokens).blocks():
        digest.update(rows)
    return digest.hexdigest()


def copy_samples(source: BinaryIO, rows: Iterable[IndexRow], out: BinaryIO, shard: ShardPlan) -> tuple[IndexRow, ...]:
    """Copy samples, plain or coded, that lie in `source` as `rows` say to their places in the plain shard `shard`.

    Samples that the shard does not have are left out, and places of others stay as they are. Returns the new rows, in
    the order of `rows`.

    Raises:
        CodedBlockError, PlanesHeadError: a coded state is damaged.
    """
    writer = ShardWriter(out, shard)
    places = {placed.key: placed for placed in shard.samples}
    copied = []
    for row in rows:
        if row.key in places:
            meta = meta_of(row)
            writer.write_sample(places[row.key], meta, _arrays(source, row))
            copied.append(index_row(places[row.key], meta, shard.name))
    return tuple(copied)


def _arrays(source: BinaryIO, row: IndexRow) -> dict[str, Sequence[Piece]]:
    path, handle = Path(source.name), source.fileno()
    return {
        name: [
            FileRange(path=path, handle=handle, offset=place.offset, length=place.length)
            if place.coded is None
            else CodedRows(file_state(path, handle, row, name), row.num_tokens)
        ]
        for name, place in row.arrays.items()
    }
