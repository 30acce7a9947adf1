"""How many threads work on shards at once."""

from __future__ import annotations

import os

_MOST = 4
"""Beyond this a disk is the limit, and each shard under way needs its space at once."""


def worker_count(asked: int | None) -> int:
    """Return what was asked for, else the number of processors that this process may use, at most 4."""
    return asked or min(len(os.sched_getaffinity(0)), _MOST)
