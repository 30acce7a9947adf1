"""How many threads work on shards, or decode states, at once."""

from __future__ import annotations

import os

_MOST = 4
"""Beyond this a disk is the limit, and each shard under way needs its space at once."""

_MOST_DECODING = 8
"""Beside a training loop; memory is the limit before processors are."""


def worker_count(asked: int | None) -> int:
    """Return what was asked for, else the number of processors that this process may use, at most 4."""
    return asked or min(len(os.sched_getaffinity(0)), _MOST)


def decode_threads() -> int:
    """Return how many threads decode side by side in this process: one in a DataLoader worker, beside the others."""
    from torch.utils.data import get_worker_info  # whoever decodes for a loop has torch; who packs has not

    if get_worker_info() is not None:
        return 1
    return min(len(os.sched_getaffinity(0)), _MOST_DECODING)
