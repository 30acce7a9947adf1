"""Which samples a reader sees and in which order: a pure function of the seed, the epoch, the rank and the worker.

epoch_order     all samples, shuffled by seed and epoch alone
rank_part       every world_size-th of them, so that ranks read one common order in turn
worker_part     of what is left of the rank's part, every num_workers-th: a DataLoader asks its workers in turn, so the
order that the training loop sees is the rank's, whatever the number of workers
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..schemas.errors import UsageError

Order = np.ndarray[Any, np.dtype[np.int64]]
"""Numbers of samples in shard order, int64 [n]."""

Remainder = Literal["keep", "drop", "repeat"]
"""What becomes of the samples that are left when their number does not divide by that of the ranks.

`keep`: each sample once; some ranks see one more. `drop`: they are left out. `repeat`: the order begins again until
every rank has as many. With the last two all ranks end together, so that no collective waits for one that has ended.
"""


def epoch_order(num_samples: int, seed: int | None, epoch: int) -> Order:
    """Return all samples in the order of an epoch: as packed without a seed, else a permutation.

    It sorts 64 raw random bits a sample, a stream that numpy guarantees; its `permutation` may change with a version,
    and a resumed run would then see other samples.
    """
    if seed is None:
        return np.arange(num_samples)
    ranks = np.random.PCG64([seed, epoch]).random_raw(num_samples)
    return np.argsort(ranks, kind="stable")


def rank_part(order: Order, rank: int, world_size: int, remainder: Remainder) -> Order:
    """Return the samples of one rank.

    Raises:
        UsageError: with `drop`, fewer samples than ranks.
    """
    if remainder == "repeat":
        order = np.resize(order, -(-len(order) // world_size) * world_size)
    elif remainder == "drop":
        if len(order) < world_size:
            raise UsageError(
                f"{len(order)} samples for {world_size} ranks: remainder='drop' would drop them all",
                mend="Use remainder='repeat'",
            )
        order = order[: len(order) - len(order) % world_size]
    return order[rank::world_size]


def worker_part(part: Order, worker: int, num_workers: int) -> Order:
    """Return the samples of one worker of a rank."""
    return part[worker::num_workers]
