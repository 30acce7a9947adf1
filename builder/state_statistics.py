"""What the rows of states look like, summed up block by block in memory that does not grow with the data.

    SpreadTally      any number of positive values -> mean, extremes, percentiles (logarithmic bins)
    StateTally       rows of one state -> norms, norms by position, channels
    CosineTally      rows of two states -> their cosine

Shape legend: N rows of a block, H hidden width.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from ..schemas.errors import DataError
from ..schemas.statistics import (
    MASSIVE_RATIO,
    OUTLIER_RATIO,
    ChannelStatistics,
    NeighbourStatistics,
    Spread,
    StateStatistics,
)

NUM_TOP_CHANNELS = 8
_MAX_POSITION_BITS = 32
_BINS_PER_DECADE = 50
"""A bin is 4.7 % wide, so its middle is within 2.4 % of any value in it."""

_LOWEST_POWER, _HIGHEST_POWER = -12, 40
_NUM_COSINE_BINS = 2000
_SAFE_TO_SUM = 1e30
_SAFE_TO_SQUARE = 1e-15
"""Norms below it may be of values whose squares are zero in float32."""

Floats = npt.NDArray[np.float64]


class NotFiniteError(DataError):
    """A stored state holds a value that is no number; `pack` refuses such, so the shard was damaged after it."""

    def __init__(self, key: str, state: str, row: int) -> None:
        """Name the first row that does."""
        super().__init__(
            f"row {row} of {state} of sample {key} holds NaN or an infinite value",
            why="The shard was damaged after it was packed",
            mend="Run `eaglehs verify` on the dataset, and copy or pack the shard again",
        )


class SpreadTally:
    """Mean, extremes and percentiles of values that are counted in fixed bins."""

    def __init__(self, middles: Floats) -> None:
        """`middles` are the values that stand for the bins, ascending."""
        self._middles = middles
        self._counts = np.zeros(len(middles), dtype=np.int64)
        self._sum = 0.0
        self._lowest, self._highest = math.inf, -math.inf

    def add(self, values: Floats, bins: npt.NDArray[np.int64]) -> None:
        """Count `values`, each in the bin of the same place."""
        if len(values):
            self._counts += np.bincount(np.clip(bins, 0, len(self._middles) - 1), minlength=len(self._middles))
            self._sum += float(values.sum())
            self._lowest = min(self._lowest, float(values.min()))
            self._highest = max(self._highest, float(values.max()))

    def spread(self) -> Spread:
        """Return what was counted; zeros where nothing was."""
        total = int(self._counts.sum())
        if not total:
            return Spread(lowest=0, p5=0, p25=0, median=0, p75=0, p95=0, highest=0, mean=0)
        p5, p25, median, p75, p95 = (self._percentile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
        return Spread(
            lowest=_short(self._lowest),
            p5=p5,
            p25=p25,
            median=median,
            p75=p75,
            p95=p95,
            highest=_short(self._highest),
            mean=_short(self._sum / total),
        )

    def _percentile(self, share: float) -> float:
        sums = np.cumsum(self._counts)
        middle = float(self._middles[int(np.searchsorted(sums, share * sums[-1]))])
        return _short(min(max(middle, self._lowest), self._highest))


class StateTally:
    """One state's rows, sample after sample."""

    def __init__(self, name: str, width: int) -> None:
        """`width` is H."""
        self._name = name
        powers = np.arange(_LOWEST_POWER * _BINS_PER_DECADE, _HIGHEST_POWER * _BINS_PER_DECADE)
        self._norms = SpreadTally(10.0 ** ((powers + 0.5) / _BINS_PER_DECADE))
        self._position_sums = np.zeros(_MAX_POSITION_BITS)
        self._position_counts = np.zeros(_MAX_POSITION_BITS, dtype=np.int64)
        self._magnitude_sums_H = np.zeros(width)
        self._maxima_H = np.full(width, -1.0)
        self._rows_H = np.zeros(width, dtype=np.int64)
        self._keys_H = np.zeros(width, dtype=np.int64)
        self._keys: list[str] = []
        self._num_rows = 0

    def update(self, key: str, start: int, values_NH: torch.Tensor) -> Floats:
        """Take rows `start`.. of the sample `key`, float32; return their norms [N].

        Raises:
            NotFiniteError: a row holds NaN or an infinite value; no mean over it means anything.
        """
        norms = _norms(values_NH)
        if not np.isfinite(norms).all():
            raise NotFiniteError(key, self._name, start + int(np.argmin(np.isfinite(norms))))
        with np.errstate(divide="ignore"):
            powers = np.nan_to_num(np.log10(norms), neginf=_LOWEST_POWER)
        self._norms.add(norms, np.floor((powers - _LOWEST_POWER) * _BINS_PER_DECADE).astype(np.int64))
        bins = np.frexp(np.arange(start, start + len(norms), dtype=np.float64))[1]  # 0, 1, 2 2, 3 3 3 3, ...
        self._position_sums += np.bincount(bins, weights=norms, minlength=_MAX_POSITION_BITS)
        self._position_counts += np.bincount(bins, minlength=_MAX_POSITION_BITS)
        self._take_channels(key, start, values_NH.abs())
        self._num_rows += len(norms)
        return norms

    def statistics(self) -> StateStatistics:
        """Return what the rows so far look like."""
        means_H = self._magnitude_sums_H / max(self._num_rows, 1)
        median = float(np.median(means_H))
        ratios_H = self._maxima_H / median if median > 0 else np.zeros_like(self._maxima_H)
        counts = self._position_counts
        num_bins = int(np.flatnonzero(counts).max(initial=-1)) + 1
        order = np.argsort(-ratios_H, kind="stable")[: NUM_TOP_CHANNELS if self._num_rows else 0]
        return StateStatistics(
            name=self._name,
            norms=self._norms.spread(),
            norms_by_position=tuple(
                _short(self._position_sums[b] / counts[b]) if counts[b] else 0.0 for b in range(num_bins)
            ),
            median_magnitude=_short(median),
            num_outlier_channels=int((ratios_H > OUTLIER_RATIO).sum()),
            num_massive_channels=int((ratios_H > MASSIVE_RATIO).sum()),
            top_channels=tuple(self._channel(int(channel), means_H, ratios_H) for channel in order),
        )

    def _take_channels(self, key: str, start: int, magnitudes_NH: torch.Tensor) -> None:
        if not self._keys or self._keys[-1] != key:
            # Only samples that hold a maximum are ever looked up, but which these are is known at the end alone.
            self._keys.append(key)
        maxima = magnitudes_NH.amax(dim=0).numpy()
        # float32 holds a block's sum to six digits and is five times as fast, but ends at 3e38
        wide = torch.float64 if maxima.max() > _SAFE_TO_SUM else torch.float32
        self._magnitude_sums_H += magnitudes_NH.sum(dim=0, dtype=wide).numpy()
        larger = np.flatnonzero(maxima > self._maxima_H)
        if len(larger):  # rare after the first blocks, so the dearer search for the row is done here alone
            self._maxima_H[larger] = maxima[larger]
            self._rows_H[larger] = magnitudes_NH[:, torch.from_numpy(larger)].argmax(dim=0).numpy() + start
            self._keys_H[larger] = len(self._keys) - 1

    def _channel(self, channel: int, means_H: Floats, ratios_H: Floats) -> ChannelStatistics:
        return ChannelStatistics(
            channel=channel,
            mean_magnitude=_short(means_H[channel]),
            max_magnitude=_short(self._maxima_H[channel]),
            ratio=_short(ratios_H[channel]),
            key=self._keys[self._keys_H[channel]],
            row=int(self._rows_H[channel]),
        )


class CosineTally:
    """The cosine between the rows of two states; rows of zeros have none and are left out."""

    def __init__(self, first: str, second: str) -> None:
        """Give the states' names."""
        self._names = (first, second)
        middles: Floats = (np.arange(_NUM_COSINE_BINS, dtype=np.float64) + 0.5) / (_NUM_COSINE_BINS / 2) - 1
        self._cosines = SpreadTally(middles)

    def update(
        self, first_NH: torch.Tensor, second_NH: torch.Tensor, first_norms: Floats, second_norms: Floats
    ) -> None:
        """Take the same rows of both states, float32, and their norms [N]."""
        norms = first_norms * second_norms
        is_some = norms > 0
        dots = torch.linalg.vecdot(first_NH, second_NH).numpy().astype(np.float64)
        cosines = dots[is_some] / norms[is_some]
        cosines = np.clip(cosines[np.isfinite(cosines)], -1.0, 1.0)
        self._cosines.add(cosines, np.floor((cosines + 1) * (_NUM_COSINE_BINS / 2)).astype(np.int64))

    def statistics(self) -> NeighbourStatistics:
        """Return what the rows so far look like."""
        return NeighbourStatistics(first=self._names[0], second=self._names[1], cosine=self._cosines.spread())


def _norms(values_NH: torch.Tensor) -> Floats:
    """Return the L2 norm of each row; in float64 where float32 can't hold the squares."""
    norms: Floats = torch.linalg.vector_norm(values_NH, dim=1).numpy().astype(np.float64)
    if not np.isfinite(norms).all() or (norms < _SAFE_TO_SQUARE).any():
        norms = torch.linalg.vector_norm(values_NH, dim=1, dtype=torch.float64).numpy()
    return norms


def _short(value: float) -> float:
    """Return six significant digits: what follows is noise, and would change the file from machine to machine."""
    return float(f"{value:.6g}")
