"""Which samples a reader sees and in which order: a pure function of the seed, the epoch, the rank and the worker.

epoch_order     all samples, shuffled by seed and epoch alone
rank_part       of every world_size samples in turn, one: ranks stay in step in one common order, and who gets which is
                chosen so that all see about as many tokens
worker_part     of what is left of the rank's part, every num_workers-th batch: a DataLoader asks its workers in turn
for one, so the order that the training loop sees is the rank's, whatever the number of workers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..schemas.counts import counted
from ..schemas.errors import UsageError

Order = np.ndarray[Any, np.dtype[np.int64]]
"""Numbers of samples in shard order, int64 [n]."""

Remainder = Literal["keep", "drop", "repeat"]
"""What becomes of the samples that are left when their number does not divide by that of the ranks.

`keep`: each sample once; some ranks see one more. `drop`: they are left out. `repeat`: the order begins again until
every rank has as many. With the last two all ranks end together, so that no collective waits for one that has ended.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which part of the samples is whose."""

    rank: int
    world_size: int
    remainder: Remainder


def epoch_order(num_samples: int, seed: int | None, epoch: int) -> Order:
    """Return all samples in the order of an epoch: as packed without a seed, else a permutation.

    It sorts 64 raw random bits a sample, a stream that numpy guarantees; its `permutation` may change with a version,
    and a resumed run would then see other samples.
    """
    if seed is None:
        return np.arange(num_samples)
    ranks = np.random.PCG64([seed, epoch]).random_raw(num_samples)
    return np.argsort(ranks, kind="stable")


def rank_part(order: Order, num_tokens: Sequence[int] | Order, ranks: Ranks) -> Order:
    """Return the samples of one rank; `num_tokens` are those of each sample, in shard order.

    Of each round of world_size samples every rank gets one, the longest the rank that has seen the fewest tokens so
    far, so that the sums of two ranks never differ by more than the longest sample. Those that
    are left in the last round go to the lowest ranks: a rank has as many samples in every epoch.

    Raises:
        UsageError: with `drop`, fewer samples than ranks.
    """
    world_size = ranks.world_size
    if ranks.remainder == "repeat":
        order = np.resize(order, -(-len(order) // world_size) * world_size)
    elif ranks.remainder == "drop":
        if len(order) < world_size:
            raise UsageError(
                f"{counted(len(order), 'sample')} for {counted(world_size, 'rank')}: "
                "remainder='drop' would drop them all",
                mend="Use remainder='repeat'",
            )
        order = order[: len(order) - len(order) % world_size]
    if world_size == 1:
        return order
    whole = len(order) - len(order) % world_size
    part = _balanced(order[:whole], np.asarray(num_tokens, dtype=np.int64), ranks)
    left = order[whole:]
    return np.append(part, left[ranks.rank]) if ranks.rank < len(left) else part


def _balanced(order: Order, num_tokens: Order, ranks: Ranks) -> Order:
    """Return one sample of each round; ties go to the lower rank and the earlier sample, as on every other rank."""
    rounds = order.reshape(-1, ranks.world_size)
    tokens = num_tokens[rounds]
    longest_first = np.argsort(-tokens, axis=1, kind="stable")
    seen = np.zeros(ranks.world_size, dtype=np.int64)
    chosen = np.empty(len(rounds), dtype=np.int64)
    for number, places in enumerate(longest_first):
        fewest_first = np.argsort(seen, kind="stable")
        seen[fewest_first] += tokens[number, places]
        chosen[number] = places[np.flatnonzero(fewest_first == ranks.rank)[0]]
    return rounds[np.arange(len(rounds)), chosen]


def worker_part(part: Order, worker: int, num_workers: int, batch_size: int = 1) -> Order:
    """Return the samples of one worker of a rank: whole batches, of which the last of all may be short."""
    own: Order = part[np.arange(len(part)) // batch_size % num_workers == worker]
    return own
