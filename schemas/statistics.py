"""Statistics: `dataset/plots/statistics.json`, what `eaglehs report` measured of a dataset. Format version 1.

dataset/plots/report.html       the page for eyes, self-contained
dataset/plots/statistics.json   this record
dataset/plots/<chart>.png       the charts, as the card shows them

Lengths, mask shares and shards are of the whole dataset; what is said of states is of `num_measured` samples, evenly
spaced over it. A norm is the L2 norm of a row (one token).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .manifest import Manifest

STATISTICS_FILENAME = "statistics.json"
REPORT_FILENAME = "report.html"

OUTLIER_RATIO = 100.0
"""A channel whose largest value is more than this many times the state's median channel: far outside any bell curve."""

MASSIVE_RATIO = 1000.0
"""Massive activations, as Sun et al. 2024 (arXiv 2402.17762) count them: about 1,000 times the median magnitude."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of values between edges; one edge more than counts, the last bin closed on both sides."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a value is spread. Lowest, mean and highest are exact, percentiles within 3 %."""

    lowest: float
    p5: float
    p25: float
    median: float
    p75: float
    p95: float
    highest: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatistics:
    """One channel of a state: a column of its hidden width."""

    channel: int
    mean_magnitude: float
    max_magnitude: float
    ratio: float
    """`max_magnitude` over the median of all channels' mean magnitude."""

    key: str
    """The sample that holds the largest value."""

    row: int
    """The row (token) that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStatistics:
    """One state over all measured rows."""

    name: str
    norms: Spread
    norms_by_position: tuple[float, ...]
    """Mean norm at positions 0, 1, 2-3, 4-7, 8-15 ...: bin b > 0 begins at 2^(b-1)."""

    median_magnitude: float
    """Median over channels of the mean magnitude."""

    num_outlier_channels: int
    """Channels over `OUTLIER_RATIO`."""

    num_massive_channels: int
    """Channels over `MASSIVE_RATIO`."""

    top_channels: tuple[ChannelStatistics, ...]
    """Those with the largest ratios, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourStatistics:
    """The cosine between the rows of two stored states that follow one another."""

    first: str
    second: str
    cosine: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatistics:
    """The contents of statistics.json."""

    KIND: ClassVar[str] = "eaglehs.statistics"
    VERSION: ClassVar[int] = 1

    shards_sha256: str
    """`shards_fingerprint` of the manifest: figures of another packing are never shown as this one's."""

    num_samples: int
    num_measured: int
    """Samples whose states were read."""

    num_measured_tokens: int
    lengths: Histogram
    """Samples by number of tokens."""

    shares: Histogram
    """Samples by the share of tokens with mask 1, 0 to 1."""

    states: tuple[StateStatistics, ...]
    """In file order: layers ascending, then `final`."""

    neighbours: tuple[NeighbourStatistics, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleExcerpt:
    """The first rows of a sample, for the report's browser; not stored."""

    key: str
    id: str
    num_tokens: int
    num_trainable: int
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    norms: dict[str, tuple[float, ...]]
    """State -> the norm of each row that is shown."""

    texts: tuple[str, ...] | None = None
    """Each token as text; None where no tokenizer was given."""


@dataclass(frozen=True, slots=True)
class PlotsFolder:
    """The paths of a report."""

    root: Path

    @property
    def statistics(self) -> Path:
        """statistics.json."""
        return self.root / STATISTICS_FILENAME

    @property
    def page(self) -> Path:
        """report.html."""
        return self.root / REPORT_FILENAME

    def image(self, chart: str) -> Path:
        """The PNG of a chart."""
        return self.root / f"{chart}.png"


def shards_fingerprint(manifest: Manifest) -> str:
    """Return the SHA-256 over names and checksums of the shards: the same data, whatever else the manifest says."""
    lines = "".join(f"{shard.name} {shard.sha256}\n" for shard in manifest.shards)
    return hashlib.sha256(lines.encode()).hexdigest()


def position_bins(num_bins: int) -> tuple[str, ...]:
    """Return what the bins of `norms_by_position` are called: 0, 1, 2-3, 4-7 ..."""
    starts = [0, *(2**power for power in range(num_bins - 1))][:num_bins]
    return tuple(str(start) if start < 2 else f"{start}-{2 * start - 1}" for start in starts)
