"""What the user should know of a plan before the work begins."""

from __future__ import annotations

from collections.abc import Iterator

from ..schemas.counts import counted
from ..schemas.sizes import format_size
from .plan import Plan

_LARGE_SHARD_BYTES = 20 * 1000**3
"""The Hub advises files under 20 GB."""

_FEW_SHARDS = 8
"""One a rank of a usual node; stock readers give a worker whole shards, so others stand idle."""

_LARGE_BYTES = 1000**3
"""A smaller dataset may have few shards without a word: it is read in seconds."""


def plan_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning for large shards, for few shards, and for each sample that is larger than a shard may be."""
    most, limit = len(plan.shards), plan.shard_size_bytes
    if limit > _LARGE_SHARD_BYTES:
        yield f"shards of {format_size(limit)} are slow to resume; the Hub advises less than 20 GB"
    if most < min(_FEW_SHARDS, plan.num_samples) and plan.size_bytes >= _LARGE_BYTES:
        yield (
            f"{counted(most, 'shard')}: stock readers keep no more than {most} workers of all ranks busy; "
            "a smaller --shard-size makes more (eaglehs.stream divides samples: there it does not matter)"
        )
    for shard in plan.shards:
        if shard.size_bytes > limit:
            key, size, most_size = shard.samples[0].key, format_size(shard.size_bytes), format_size(limit)
            yield (
                f"sample {key} alone needs {size}, more than --shard-size {counted(limit, 'byte')} ({most_size}): "
                f"it has {shard.name} to itself"
            )
