"""Measures a dataset in one pass: each array that is looked at is read once, in blocks of rows.

    index             every sample's length and mask share                        histograms
    evenly spaced     states of some samples, block by block                      builder/state_statistics
                      mapped, decoded, or read where the shards are               builder/sample_source
    first of these    ids, mask and norms of their first rows                     excerpts, for the report's browser

Memory: the index, a block of rows of each state, and sums as wide as the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ..schemas.index import IndexRow
from ..schemas.progress import Progress, Silent
from ..schemas.states import INPUT_IDS, LOSS_MASK, state_names
from ..schemas.statistics import DatasetStatistics, Histogram, SampleExcerpt, shards_fingerprint
from .catalog import Catalog, open_catalog
from .sample_source import Rows, SampleSource
from .state_statistics import CosineTally, StateTally

_BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes of float32 rows that are looked at together: fits a core's cache, as wide as models are."""

_MAX_LENGTH_BINS = 30
_NUM_SHARE_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """How much of a dataset is looked at."""

    max_samples: int | None = 256
    """Samples whose states are read, evenly spaced; None for all."""

    num_excerpts: int = 12
    """Samples of these that can be browsed."""

    excerpt_tokens: int = 400
    """First rows of each that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A dataset's figures, and samples to look at."""

    statistics: DatasetStatistics
    excerpts: tuple[SampleExcerpt, ...]


def measure_dataset(dataset: Path, settings: MeasureSettings, progress: Progress | None = None) -> Measured:
    """Measure the packed dataset in the folder `dataset`.

    Raises:
        UsageError: no packed dataset is there.
        DataError: manifest, index and shards do not belong together (builder/catalog.py).
        StorageError: a shard can't be opened.
    """
    catalog = open_catalog(dataset, takes_remote=True)
    progress = progress or Silent()
    chosen = evenly_spaced(catalog.rows, settings.max_samples)
    progress.begin(
        "measure",
        num_samples=len(chosen),
        num_tokens=sum(row.num_tokens for row in chosen),
        size_bytes=sum(row.array_bytes for row in chosen),
    )
    shown = {row.key for row in evenly_spaced(chosen, settings.num_excerpts)}
    excerpts = []
    with SampleSource(catalog) as source, _one_thread():
        pass_ = _Pass(catalog, source)
        for row in chosen:
            excerpt = pass_.take(row, settings.excerpt_tokens if row.key in shown else 0)
            excerpts += [excerpt] if row.key in shown else []
            progress.advance(num_samples=1, num_tokens=row.num_tokens, size_bytes=row.array_bytes)
    statistics = DatasetStatistics(
        shards_sha256=shards_fingerprint(catalog.manifest),
        num_samples=len(catalog.rows),
        num_measured=len(chosen),
        num_measured_tokens=sum(row.num_tokens for row in chosen),
        lengths=_length_histogram([row.num_tokens for row in catalog.rows]),
        shares=_share_histogram(catalog.rows),
        states=tuple(tally.statistics() for tally in pass_.states),
        neighbours=tuple(tally.statistics() for tally in pass_.pairs),
    )
    return Measured(statistics=statistics, excerpts=tuple(excerpts))


class _Pass:
    """One pass over states, in the order of the shards."""

    def __init__(self, catalog: Catalog, source: SampleSource) -> None:
        self._source = source
        self._width = catalog.manifest.model.hidden_size
        names = state_names(catalog.manifest.layers)
        self.states = [StateTally(name, self._width) for name in names]
        self.pairs = [CosineTally(first, second) for first, second in pairwise(names)]
        self._names = names

    def take(self, row: IndexRow, num_shown: int) -> SampleExcerpt:
        """Look at all rows of a sample; return its first `num_shown`."""
        arrays = self._source.read(row, (INPUT_IDS, LOSS_MASK))
        norms: dict[str, list[float]] = {name: [] for name in self._names}
        with self._source.open_rows(row, self._names) as sample:
            self._take_states(row, sample, norms, num_shown)
        return SampleExcerpt(
            key=row.key,
            id=row.id,
            num_tokens=row.num_tokens,
            num_trainable=row.num_trainable,
            input_ids=tuple(arrays[INPUT_IDS][:num_shown].tolist()),
            loss_mask=tuple(arrays[LOSS_MASK][:num_shown].tolist()),
            norms={name: tuple(values) for name, values in norms.items()},
        )

    def _take_states(self, row: IndexRow, sample: Rows, norms: dict[str, list[float]], num_shown: int) -> None:
        """Look at all states of a sample; add the norms of its first `num_shown` rows to `norms`."""
        step = max(_BLOCK_BYTES // (4 * self._width), 1)
        for start in range(0, row.num_tokens, step):
            end = min(start + step, row.num_tokens)
            blocks = [sample.rows(name, start, end).to(torch.float32) for name in self._names]
            found = [tally.update(row.key, start, block) for tally, block in zip(self.states, blocks, strict=True)]
            for name, block_norms in zip(self._names, found, strict=True):
                norms[name] += block_norms[: max(num_shown - start, 0)].tolist()
            for pair, both, both_norms in zip(self.pairs, pairwise(blocks), pairwise(found), strict=True):
                pair.update(*both, *both_norms)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: blocks are too small to share, and waiting for others cost ten times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evenly_spaced(rows: Sequence[IndexRow], count: int | None) -> list[IndexRow]:
    """Return `count` of `rows`, evenly spaced, the first and the last among them; all where there are no more."""
    if count is None or count >= len(rows):
        return list(rows)
    picked = np.unique(np.rint(np.linspace(0, len(rows) - 1, count)).astype(np.int64))
    return [rows[number] for number in picked]


def _length_histogram(lengths: Sequence[int]) -> Histogram:
    """Return bins of a round width (1, 2 or 5 times a power of ten), at most 30 of them."""
    longest = max(lengths, default=0)
    width = next(
        step * 10**power
        for power in range(12)
        for step in (1, 2, 5)
        if longest // (step * 10**power) < _MAX_LENGTH_BINS
    )
    edges = np.arange(0, longest // width + 2) * width
    counts, _ = np.histogram(lengths, bins=edges)
    first = int(np.argmax(counts > 0))
    return Histogram(edges=tuple(edges[first:].astype(float).tolist()), counts=tuple(counts[first:].tolist()))


def _share_histogram(rows: Sequence[IndexRow]) -> Histogram:
    # In whole parts of a bin: a share such as 0.15 must not fall below its own edge by rounding.
    bins = [min(row.num_trainable * _NUM_SHARE_BINS // row.num_tokens, _NUM_SHARE_BINS - 1) for row in rows]
    edges = tuple(number / _NUM_SHARE_BINS for number in range(_NUM_SHARE_BINS + 1))
    return Histogram(edges=edges, counts=tuple(np.bincount(bins, minlength=_NUM_SHARE_BINS).tolist()))
