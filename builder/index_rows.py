"""Rows of the index: made of a sample at its planned place, and back to what its `meta.json` says."""

from __future__ import annotations

from ..schemas.index import ArrayPlace, IndexRow
from ..schemas.sample import SampleMeta
from .plan import META, PlacedSample


def index_row(placed: PlacedSample, meta: SampleMeta, shard: str) -> IndexRow:
    """Return the index row of a sample at its place in the plain shard `shard`."""
    arrays = {
        member.array: ArrayPlace(
            offset=member.data_offset, length=member.data_bytes, xxh3_128=meta.xxh3_128[member.array]
        )
        for member in placed.members
        if member.array != META
    }
    return row_of(meta, shard, arrays)


def row_of(meta: SampleMeta, shard: str, arrays: dict[str, ArrayPlace]) -> IndexRow:
    """Return the index row of a sample whose arrays lie in `shard` as `arrays` say."""
    return IndexRow(
        shard=shard,
        key=meta.key,
        id=meta.id,
        source=meta.source,
        num_tokens=meta.num_tokens,
        num_trainable=meta.num_trainable,
        next_token=meta.next_token,
        arrays=arrays,
    )


def meta_of(row: IndexRow) -> SampleMeta:
    """Return the sample's `meta.json`, all of which stands in its row."""
    return SampleMeta(
        key=row.key,
        id=row.id,
        source=row.source,
        num_tokens=row.num_tokens,
        num_trainable=row.num_trainable,
        next_token=row.next_token,
        xxh3_128={name: place.xxh3_128 for name, place in row.arrays.items()},
    )
