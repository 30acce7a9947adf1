"""Index: `dataset/_index/samples.parquet`, a row a sample in shard order: where each array lies. Versions 1 and 2.

Columns:

    shard           string   name as in the manifest
    key, id, source string
    num_tokens      int64
    num_trainable   int64
    next_token      int64
    <array>.offset    int64    of the array's first byte in the shard, after the .npy header; a multiple of 64
    <array>.length    int64    bytes of the array, not coded
    <array>.xxh3_128  string   32 hex digits

for each array of schemas/states.py in its order. The parquet's key-value metadata holds `eaglehs.kind` =
`eaglehs.index`, `eaglehs.version` = `1`.

Version 2 is that of a dataset with a codec; a plain one is written as version 1. `<array>.offset` of a coded array is
that of its member's content, and after the three columns of each state stand

    <array>.codec        string   `planes-zstd` (schemas/planes.py)
    <array>.coded_length int64    bytes in the shard
    <array>.dtype        string   `<u2`: of the array, not coded
    <array>.width        int64    H; the array is [num_tokens, H]
"""

from __future__ import annotations

from dataclasses import dataclass

from .states import Codec

INDEX_KIND = "eaglehs.index"
PLAIN_INDEX_VERSION = 1
CODED_INDEX_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedForm:
    """How an array that is not plain stands in its shard."""

    codec: Codec
    length: int
    """Bytes in the shard."""

    dtype: str
    """Of the array, not coded: `<u2`."""

    width: int
    """H; the array is [num_tokens, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """Where one array lies in its shard."""

    offset: int
    length: int
    """Bytes of the array, not coded."""

    xxh3_128: str
    """Over the array, not coded."""

    coded: CodedForm | None = None
    """None: the shard holds the array as it is."""

    @property
    def stored_bytes(self) -> int:
        """Bytes in the shard, from `offset` on."""
        return self.length if self.coded is None else self.coded.length


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

    @property
    def array_bytes(self) -> int:
        """Bytes of all arrays, not coded."""
        return sum(place.length for place in self.arrays.values())
