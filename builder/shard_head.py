"""What a shard says of itself: whose it is, how its samples are laid out, and where each array lies.

For a dataset whose index is lost, for shards that come without manifest and index, and to tell a shard's packing.
Only headers and `meta.json` are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.errors import DataError
from ..schemas.index import IndexRow
from ..schemas.sample import META_MEMBER, SampleMeta
from ..schemas.states import FINAL, Codec, layers_of, state_member
from .file_map import open_to_read
from .npy import parse_npy_header
from .plan import DatasetLayout
from .tar_reader import MAX_NPY_HEADER, OpenShard, planes_head, read_members, read_meta, read_samples

_FINAL_COLUMNS = {state_member(FINAL, codec): codec for codec in Codec}


class ForeignShardError(DataError):
    """A tar file does not begin with a sample of eaglehs."""


def scan_shard(path: Path, *, name: str, layout: DatasetLayout) -> Iterator[IndexRow]:
    """Yield the samples of the shard at `path` in file order; `name` is its name in the rows.

    Raises:
        TarHeaderError, NpyHeaderError, RecordError, ShardStructureError: it is damaged or no shard of this layout.
        StorageError: it can't be opened.
    """
    with opened(path) as shard:
        yield from read_samples(shard, name, layout)


def first_meta(path: Path) -> SampleMeta:
    """Return the `meta.json` of the first sample of the shard at `path`.

    Raises:
        ForeignShardError, TarHeaderError, RecordError, ShardStructureError: it is damaged or no shard of ours.
        StorageError: it can't be opened.
    """
    with opened(path) as shard:
        return first_meta_of(shard)


def layout_of(path: Path) -> DatasetLayout:
    """Return the layers and the width of the samples of the shard at `path`, from its first one.

    Raises:
        ForeignShardError, TarHeaderError, NpyHeaderError, PlanesHeadError, RecordError, ShardStructureError: it is
            damaged or no shard of ours.
        StorageError: it can't be opened.
    """
    with opened(path) as shard:
        meta = first_meta_of(shard)
        own = takewhile(lambda member: member.key == meta.key, read_members(shard))
        final = next((member for member in own if member.column in _FINAL_COLUMNS), None)
        if final is None:
            raise ForeignShardError(f"{path}: sample {meta.key} has no {' or '.join(_FINAL_COLUMNS)}")
        codec = _FINAL_COLUMNS[final.column]
        if codec is Codec.PLAIN:
            start = shard.read(final.offset, min(final.size, MAX_NPY_HEADER))
            width = parse_npy_header(start, where=f"{path}: {final.name}").shape[1]
        else:
            width = planes_head(shard, final).width
    return DatasetLayout(layers=tuple(sorted(layers_of(meta.xxh3_128))), hidden_size=width, codec=codec)


@contextmanager
def opened(path: Path) -> Iterator[OpenShard]:
    """Open the shard at `path` for reading.

    Raises:
        StorageError: it can't be opened.
    """
    handle = open_to_read(path)
    try:
        yield OpenShard(path=path, handle=handle, size_bytes=os.fstat(handle).st_size)
    finally:
        os.close(handle)


def first_meta_of(shard: OpenShard) -> SampleMeta:
    """Return the `meta.json` of the first sample of an open shard; errors as `first_meta`."""
    first = next(read_members(shard), None)
    if first is None or first.column != META_MEMBER:
        found = "holds no member" if first is None else f"begins with {first.name} ({counted(first.size, 'byte')})"
        raise ForeignShardError(f"{shard.path} {found}, expected <key>.{META_MEMBER}", why="It is no shard of eaglehs")
    return read_meta(shard, first)
