"""How samples are dealt to shards: what decides, with the samples themselves, every byte of a dataset's shards."""

from __future__ import annotations

from dataclasses import dataclass, field

from .codec import since
from .sizes import DEFAULT_SHARD_BYTES
from .states import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The same of it gives the same shards; what packs, plans to or says that it was packed has these fields."""

    shard_size_bytes: int = DEFAULT_SHARD_BYTES
    """Upper bound of a shard file."""

    shuffle_seed: int | None = None
    """None: in the order of the prompts."""

    shard_multiple: int = 1
    """The number of shards is divisible by it, before samples are set aside."""

    codec: Codec = field(default=Codec.PLAIN, metadata=since(2))
    """How the states are stored in the finished shards."""
