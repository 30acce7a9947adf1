"""Index: `dataset/_index/samples.parquet`, a row a sample in shard order: where each array lies. Format version 1.

Columns:

    shard           string   name as in the manifest
    key, id, source string
    num_tokens      int64
    num_trainable   int64
    next_token      int64
    <array>.offset    int64    of the array's first byte in the shard, after the .npy header; a multiple of 64
    <array>.length    int64    bytes
    <array>.xxh3_128  string   32 hex digits

for each array of schemas/states.py in its order. The parquet's key-value metadata holds `eaglehs.kind` =
`eaglehs.index`, `eaglehs.version` = `1`.
"""

from __future__ import annotations

from dataclasses import dataclass

INDEX_KIND = "eaglehs.index"
INDEX_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """Where one array lies in its shard."""

    offset: int
    length: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """One sample of the index."""

    shard: str
    key: str
    id: str
    source: str
    num_tokens: int
    num_trainable: int
    next_token: int
    arrays: dict[str, ArrayPlace]
    """Array name -> place, in member order."""
