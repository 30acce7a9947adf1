"""What is plotted of a dataset: numbers to charts, each drawn twice, as SVG (svg.py) and as PNG (plots.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..schemas.counts import counted
from ..schemas.manifest import Manifest, ShardEntry
from ..schemas.statistics import MASSIVE_RATIO, OUTLIER_RATIO, DatasetStatistics, Histogram, Spread, position_bins

_MAX_SHARD_BARS = 60
_CHANNELS_A_STATE = 3


class Mark(StrEnum):
    """How a chart's values are drawn."""

    BARS = "bars"
    """One series, a bar a label."""

    LINES = "lines"
    """A line a series over the labels."""

    BOXES = "boxes"
    """Five series (5, 25, 50, 75 and 95 %), a box a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One value a label of its chart; None where there is none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart, and how its axes are called."""

    name: str
    """File name of the PNG without its ending."""

    title: str
    caption: str
    mark: Mark
    x_label: str
    y_label: str
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    is_log: bool = False
    """Whether the value axis is logarithmic; values of 0 and less are then not drawn."""

    highest: float | None = None
    """End of the value axis, where it is not the largest value's."""

    lowest: float = 0.0
    """Start of a linear value axis."""

    def values(self) -> Iterator[float]:
        """Yield all values that can be drawn."""
        for series in self.series:
            yield from (value for value in series.values if value is not None and (value > 0 or not self.is_log))


def charts(manifest: Manifest, statistics: DatasetStatistics) -> tuple[Chart, ...]:
    """Return all charts of a dataset; the card shows those of `CARD_CHARTS`."""
    return (
        _lengths(statistics),
        _shares(statistics),
        _norms(statistics),
        _channels(statistics),
        _positions(statistics),
        _cosines(statistics),
        _shards(manifest),
    )


CARD_CHARTS = ("lengths", "trainable", "norms", "channels", "shards")


def _lengths(statistics: DatasetStatistics) -> Chart:
    return _histogram_chart(
        statistics.lengths,
        name="lengths",
        title="Sample lengths",
        x_label="tokens in a sample",
        labels=[f"{edge:,.0f}" for edge in statistics.lengths.edges[:-1]],
    )


def _shares(statistics: DatasetStatistics) -> Chart:
    return _histogram_chart(
        statistics.shares,
        name="trainable",
        title="Share of tokens to train on",
        x_label="tokens with loss mask 1, % of a sample",
        labels=[f"{100 * edge:.0f}" for edge in statistics.shares.edges[:-1]],
    )


def _histogram_chart(histogram: Histogram, *, name: str, title: str, x_label: str, labels: Sequence[str]) -> Chart:
    return Chart(
        name=name,
        title=title,
        caption=f"{counted(sum(histogram.counts), 'sample')}; a bar begins at its label.",
        mark=Mark.BARS,
        x_label=x_label,
        y_label="samples",
        labels=tuple(labels),
        series=(Series(name="samples", values=tuple(map(float, histogram.counts))),),
    )


def _norms(statistics: DatasetStatistics) -> Chart:
    return Chart(
        name="norms",
        title="Row norms by state",
        caption="L2 norm of a row: box 25 to 75 %, whiskers 5 to 95 %, line the median.",
        mark=Mark.BOXES,
        x_label="state",
        y_label="norm",
        labels=tuple(state.name for state in statistics.states),
        series=_boxes([state.norms for state in statistics.states]),
        is_log=True,
    )


def _cosines(statistics: DatasetStatistics) -> Chart:
    pairs = statistics.neighbours
    lowest = min((pair.cosine.p5 for pair in pairs), default=0.0)
    return Chart(
        name="cosines",
        title="Cosine between neighbouring states",
        caption="1 would be the same direction in both; unrelated rows lie near 0.",
        mark=Mark.BOXES,
        x_label="states",
        y_label="cosine",
        labels=tuple(f"{pair.first} · {pair.second}" for pair in pairs),
        series=_boxes([pair.cosine for pair in pairs]),
        highest=1.0,
        lowest=0.0 if lowest >= 0 else -1.0,
    )


def _boxes(spreads: Sequence[Spread]) -> tuple[Series, ...]:
    return (
        Series(name="5 %", values=tuple(spread.p5 for spread in spreads)),
        Series(name="25 %", values=tuple(spread.p25 for spread in spreads)),
        Series(name="median", values=tuple(spread.median for spread in spreads)),
        Series(name="75 %", values=tuple(spread.p75 for spread in spreads)),
        Series(name="95 %", values=tuple(spread.p95 for spread in spreads)),
    )


def _positions(statistics: DatasetStatistics) -> Chart:
    num_bins = max((len(state.norms_by_position) for state in statistics.states), default=0)
    return Chart(
        name="positions",
        title="Norms over position",
        caption="Mean norm of the rows at these positions; the first token often stands out (attention sink).",
        mark=Mark.LINES,
        x_label="position in the sample",
        y_label="mean norm",
        labels=position_bins(num_bins),
        series=tuple(
            Series(name=state.name, values=tuple(value or None for value in state.norms_by_position))
            for state in statistics.states
        ),
        is_log=True,
    )


def _channels(statistics: DatasetStatistics) -> Chart:
    tops = [(state, channel) for state in statistics.states for channel in state.top_channels[:_CHANNELS_A_STATE]]
    outliers = ", ".join(f"{state.name} {state.num_outlier_channels:,}" for state in statistics.states)
    return Chart(
        name="channels",
        title="Largest channels by state",
        caption=f"Largest value over the median channel's mean magnitude; {MASSIVE_RATIO:,.0f} and more are called "
        f"massive activations. Channels above {OUTLIER_RATIO:.0f}: {outliers}.",
        mark=Mark.BARS,
        x_label="state and channel",
        y_label="times the median",
        labels=tuple(f"{state.name} #{channel.channel}" for state, channel in tops),
        series=(Series(name="ratio", values=tuple(channel.ratio for _, channel in tops)),),
        is_log=True,
    )


def _shards(manifest: Manifest) -> Chart:
    step = -(-len(manifest.shards) // _MAX_SHARD_BARS) or 1
    groups = [manifest.shards[start : start + step] for start in range(0, len(manifest.shards), step)]
    unit, divisor = _byte_unit(manifest.shards)
    means = (sum(shard.size_bytes for shard in group) / len(group) / divisor for group in groups)
    tokens = [shard.num_tokens for shard in manifest.shards]
    return Chart(
        name="shards",
        title="Shard sizes",
        caption=f"{counted(len(manifest.shards), 'shard')} of {min(tokens, default=0):,} to "
        f"{counted(max(tokens, default=0), 'token')}" + ("." if step == 1 else f"; a bar is the mean of {step}."),
        mark=Mark.BARS,
        x_label="shard",
        y_label=unit,
        labels=tuple(str(start) for start in range(0, len(manifest.shards), step)),
        series=(Series(name=unit, values=tuple(means)),),
    )


def _byte_unit(shards: Sequence[ShardEntry]) -> tuple[str, int]:
    largest = max((shard.size_bytes for shard in shards), default=0)
    return next(
        (unit, size)
        for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
        if largest >= size or size == 1
    )
