"""Sample: one prompt with all its rows, as a shard holds it; and the checked state in between. Format version 1.

`<key>.meta.json` is the first member of each sample in a shard:

    kind, version   "eaglehs.sample", 1
    key, id         the safe name, and the user's own
    num_tokens      T
    num_trainable   tokens with loss mask 1
    source          where the prompt came from
    next_token      the token that the engine chose after the last row (temperature 0); -1 where it gave none
    xxh3_128        array name -> 32 hex digits over its bytes (without the .npy header)

Its size is known before the states are (`meta_bytes`): JSON padded with blanks to a multiple of 512, so that a shard
can be laid out before the first forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from .codec import dumps
from .states import INPUT_IDS, LOSS_MASK, state_names

META_MEMBER = "meta.json"
NO_NEXT_TOKEN = -1
_TAR_BLOCK = 512
_WIDEST_INT = 2**31 - 1
_HASH_CHARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """What `<key>.meta.json` holds."""

    KIND: ClassVar[str] = "eaglehs.sample"
    VERSION: ClassVar[int] = 1

    key: str
    id: str
    num_tokens: int
    num_trainable: int
    source: str
    next_token: int
    xxh3_128: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRef:
    """One dump of a finished sample, as the ledger lists it."""

    name: str
    """File name without folder."""

    size_bytes: int
    xxh3_128: str
    """Over the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSample:
    """A prompt whose dumps were all found, whole, its own and plausible."""

    key: str
    num_tokens: int
    dumps: tuple[DumpRef, ...]
    """In row order; they cover 0..num_tokens without gap or overlap."""

    state_norms: dict[str, float]
    """State name -> mean L2 norm of up to 64 evenly spaced rows; shows a wrong layer or a dead one at a glance."""

    xxh3_128: dict[str, str] = field(default_factory=dict)
    """Array -> hash over its bytes: ids, mask and states; what `meta.json` will say."""


def meta_bytes(meta: SampleMeta, layers: Iterable[int]) -> int:
    """Return the size of the sample's `meta.json`, the same whatever the hashes, mask and next token will be."""
    hashes = dict.fromkeys((INPUT_IDS, LOSS_MASK, *state_names(layers)), "0" * _HASH_CHARS)
    widest = SampleMeta(
        key=meta.key,
        id=meta.id,
        num_tokens=_WIDEST_INT,
        num_trainable=_WIDEST_INT,
        source=meta.source,
        next_token=_WIDEST_INT,
        xxh3_128=hashes,
    )
    return -(-(len(dumps(widest).encode("utf-8", "surrogatepass")) + 1) // _TAR_BLOCK) * _TAR_BLOCK


def meta_content(meta: SampleMeta, layers: Iterable[int]) -> bytes:
    """Return the bytes of the sample's `meta.json`: JSON, blanks up to `meta_bytes`, a newline."""
    text = dumps(meta).encode("utf-8", "surrogatepass")
    return text.ljust(meta_bytes(meta, layers) - 1) + b"\n"
