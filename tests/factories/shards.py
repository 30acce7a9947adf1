"""Laid out shards of made-up samples, and what is written to them."""

import numpy as np
import xxhash
from eaglehs.builder.plan import DatasetLayout, PlacedSample, PlannedSample, ShardPlan, lay_out_shard
from eaglehs.schemas.sample import SampleMeta

LAYOUT = DatasetLayout(layers=(1, 2), hidden_size=64)


def shard_of(*lengths: int) -> ShardPlan:
    """Lay out samples p0, p1, ... of so many tokens each."""
    planned = [PlannedSample(key=f"p{i}", id=f"p{i}", source="s", num_tokens=n) for i, n in enumerate(lengths)]
    return lay_out_shard(0, planned, LAYOUT)


def arrays_of(placed: PlacedSample) -> dict[str, bytes]:
    """Return noise for each array, always the same for one place."""
    random = np.random.default_rng(placed.start + 1)
    return {spec.name: random.bytes(placed.sample.num_tokens * spec.row_bytes) for spec in LAYOUT.specs}


def meta_of(placed: PlacedSample, arrays: dict[str, bytes]) -> SampleMeta:
    """Return what is true of `arrays`."""
    sample = placed.sample
    return SampleMeta(
        key=placed.key,
        id=sample.id,
        source=sample.source,
        num_tokens=sample.num_tokens,
        num_trainable=0,
        next_token=1,
        xxh3_128={name: xxhash.xxh3_128_hexdigest(content) for name, content in arrays.items()},
    )
