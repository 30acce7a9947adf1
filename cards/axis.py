"""The value axis of a chart: where it begins and ends, and which values are written beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .charts import Chart

_NUM_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Return where `value` lies: 0 at the axis' low end, 1 at the high one; values outside are put at the ends."""
        if self.is_log:
            value, low, high = math.log10(max(value, self.low)), math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return min(max((value - low) / (high - low), 0.0), 1.0)


def axis_of(chart: Chart) -> Axis:
    """Return an axis that holds all values of the chart and ends at round numbers."""
    values = list(chart.values())
    return _log_axis(values) if chart.is_log else _linear_axis(values, chart)


def tick_text(value: float) -> str:
    """Return a tick as people write it: 0.5, 20, 1,500, 2e+06."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 100_000 else f"{value:g}"


def _linear_axis(values: list[float], chart: Chart) -> Axis:
    low = chart.lowest
    span = (chart.highest if chart.highest is not None else max(values, default=1.0)) - low
    rough = (span if span > 0 else 1.0) / _NUM_STEPS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if chart.y_label == "samples":  # no half samples
        step = max(math.ceil(step), 1)
    num_steps = math.ceil((span if span > 0 else 1.0) / step - 1e-9)
    ticks = tuple(round(low + number * step, 12) for number in range(num_steps + 1))
    return Axis(low=low, high=ticks[-1], is_log=False, ticks=ticks)


def _log_axis(values: list[float]) -> Axis:
    smallest, largest = min(values, default=1.0), max(values, default=10.0)
    first = math.floor(math.log10(smallest) + 1e-9)
    last = max(math.ceil(math.log10(largest) - 1e-9), first + 1)
    step = -(-(last - first) // 6)
    ticks = [10.0**power for power in range(first, last + 1, step)]
    if last - first == 1:
        ticks = [factor * 10.0**first for factor in (1, 2, 5, 10)]
    return Axis(low=10.0**first, high=10.0**last, is_log=True, ticks=tuple(ticks))
