"""A chart as inline SVG: its colours are CSS variables of the page, so it follows light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .axis import Axis, axis_of, tick_text
from .charts import Chart, Mark

_WIDTH, _HEIGHT = 460.0, 262.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 26.0, 56.0
_CHAR_WIDTH = 6.4
"""Of a label's letter, in the same units."""

_NUM_COLOURS = 5


def chart_svg(chart: Chart) -> str:
    """Return the chart as an `<svg>` element with a title for screen readers."""
    axis = axis_of(chart)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(chart.title)}">',
        f"<title>{escape(chart.title)}</title>",
        *_grid(axis),
        *_labels(chart),
        *_MARKS[chart.mark](chart, axis),
        _text(_WIDTH - _RIGHT, _HEIGHT - 3, chart.x_label, "end", "name"),
        _text(4, 14, chart.y_label, "start", "name"),
        "</svg>",
    ]
    return "\n".join(parts)


def _bars(chart: Chart, axis: Axis) -> Iterator[str]:
    step = _plot_width() / max(len(chart.labels), 1)
    gap = min(step * 0.15, 12)
    for number, (label, value) in enumerate(zip(chart.labels, chart.series[0].values, strict=True)):
        if value is None or value <= 0:
            continue
        y = _y(axis, value)
        yield (
            f'<rect class="bar" x="{_LEFT + number * step + gap / 2:.1f}" y="{y:.1f}" width="{step - gap:.1f}" '
            f'height="{max(_floor() - y, 0.8):.1f}"><title>{escape(label)}: {value:,.6g}</title></rect>'
        )


def _lines(chart: Chart, axis: Axis) -> Iterator[str]:
    step = _plot_width() / max(len(chart.labels), 1)
    legend = _LEFT + 70
    for number, series in enumerate(chart.series):
        points = [
            (_LEFT + (place + 0.5) * step, _y(axis, value))
            for place, value in enumerate(series.values)
            if value is not None
        ]
        colour = f"c{number % _NUM_COLOURS}"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="line {colour}" points="{path}"><title>{escape(series.name)}</title></polyline>'
        yield from (f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)
        yield f'<circle class="dot {colour}" cx="{legend:.1f}" cy="10" r="4"/>'
        yield _text(legend + 8, 14, series.name, "start", "tick")
        legend += 24 + len(series.name) * _CHAR_WIDTH


def _boxes(chart: Chart, axis: Axis) -> Iterator[str]:
    step = _plot_width() / max(len(chart.labels), 1)
    width = min(step * 0.5, 60)
    for number, values in enumerate(zip(*(series.values for series in chart.series), strict=True)):
        p5, p25, median, p75, p95 = (_y(axis, value or 0.0) for value in values)
        x = _LEFT + (number + 0.5) * step
        told = ", ".join(f"{s.name}: {v:.4g}" for s, v in zip(chart.series, values, strict=True) if v is not None)
        yield f"<g><title>{escape(chart.labels[number])}: {told}</title>"
        yield f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{p5:.1f}" y2="{p95:.1f}"/>'
        yield (
            f'<rect class="box" x="{x - width / 2:.1f}" y="{p75:.1f}" width="{width:.1f}" '
            f'height="{max(p25 - p75, 1.0):.1f}"/>'
        )
        ends = f'x1="{x - width / 2:.1f}" x2="{x + width / 2:.1f}"'
        yield f'<line class="median" {ends} y1="{median:.1f}" y2="{median:.1f}"/>'
        yield _text(x + width / 2 + 4, median + 3.5, f"{values[2] or 0:.3g}", "start", "tick")
        yield "</g>"


_MARKS = {Mark.BARS: _bars, Mark.LINES: _lines, Mark.BOXES: _boxes}


def _grid(axis: Axis) -> Iterator[str]:
    for tick in axis.ticks:
        y = _y(axis, tick)
        yield f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 6, y + 4, tick_text(tick), "end", "tick")


def _labels(chart: Chart) -> Iterator[str]:
    """Yield every label, or every n-th where they would touch one another."""
    step = _plot_width() / max(len(chart.labels), 1)
    longest = max((len(label) for label in chart.labels), default=0) * _CHAR_WIDTH + 8
    every = max(1, -(-int(longest) // int(max(step, 1))))
    is_slanted = every > 1 and len(chart.labels) <= 16
    for number, label in enumerate(chart.labels):
        x, y = _LEFT + (number + 0.5) * step, _floor() + 14
        if is_slanted:
            text = label if len(label) <= 18 else f"{label[:17]}…"
            place = f"translate({x + 4:.1f} {y - 4:.1f}) rotate(-30)"
            yield f'<text class="tick small" text-anchor="end" transform="{place}">{escape(text)}</text>'
        elif number % every == 0:
            yield _text(x, y, label, "middle", "tick")


def _text(x: float, y: float, text: str, anchor: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _plot_width() -> float:
    return _WIDTH - _LEFT - _RIGHT


def _floor() -> float:
    return _HEIGHT - _BOTTOM


def _y(axis: Axis, value: float) -> float:
    return _floor() - axis.place(value) * (_floor() - _TOP)
