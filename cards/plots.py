"""Charts as PNG files by matplotlib, on white: they are seen on pages whose colours are not ours."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..schemas.atomic import write_atomically
from ..schemas.errors import MissingPackageError
from ..schemas.statistics import PlotsFolder
from .axis import axis_of, tick_text
from .charts import Chart, Mark

_SIZE_INCHES = (3.7, 2.6)
"""Small, so that letters are large beside the drawing: the card shows three in a row."""

_DPI = 180
_COLOURS = ("#2563a8", "#c2571a", "#2d7d46", "#8a3ea1", "#8c7a10")
_MAX_UPRIGHT_CHARS = 44
"""Of all labels on one line; where they are more, short ones are thinned out and long ones are slanted."""

_SHORT_CHARS = 7
_MAX_LABELS = 12


def write_plots(charts: tuple[Chart, ...], folder: PlotsFolder) -> tuple[Path, ...]:
    """Write a PNG a chart, and return the paths. The same charts are the same bytes with the same matplotlib.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    check_can_plot()
    written = []
    for chart in charts:
        path = folder.image(chart.name)
        write_atomically(path, _png(chart))
        written.append(path)
    return tuple(written)


def check_can_plot() -> None:
    """Refuse before any work is done where matplotlib is not installed.

    Raises:
        MissingPackageError: it is not.
    """
    try:
        import matplotlib.figure  # noqa: F401 - whether it can be imported is the question
    except ImportError:
        raise MissingPackageError("matplotlib", extra="plots", needed_for="`eaglehs report`") from None


def _png(chart: Chart) -> bytes:
    # Figure, not pyplot: no global state, no display, and nothing that another thread's plot could touch.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=_SIZE_INCHES, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _MARKS[chart.mark](chart, axes)
    _dress(chart, axes)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def _bars(chart: Chart, axes: Any) -> None:
    axes.bar(
        range(len(chart.labels)), [value or 0.0 for value in chart.series[0].values], color=_COLOURS[0], width=0.85
    )


def _lines(chart: Chart, axes: Any) -> None:
    for number, series in enumerate(chart.series):
        places = [place for place, value in enumerate(series.values) if value is not None]
        values = [value for value in series.values if value is not None]
        axes.plot(places, values, marker="o", markersize=3, color=_COLOURS[number % len(_COLOURS)], label=series.name)
    axes.legend(fontsize=6.5, frameon=False, ncols=len(chart.series), loc="upper center", columnspacing=1.0)


def _boxes(chart: Chart, axes: Any) -> None:
    names = ("whislo", "q1", "med", "q3", "whishi")
    columns = zip(*(series.values for series in chart.series), strict=True)
    boxes = [dict(zip(names, values, strict=True)) for values in columns]
    paint = {"facecolor": "#c9dcf0", "edgecolor": _COLOURS[0]}
    axes.bxp(
        boxes,
        positions=range(len(boxes)),
        showfliers=False,
        patch_artist=True,
        boxprops=paint,
        medianprops={"color": _COLOURS[1], "linewidth": 2},
    )


_MARKS = {Mark.BARS: _bars, Mark.LINES: _lines, Mark.BOXES: _boxes}


def _dress(chart: Chart, axes: Any) -> None:
    axis = axis_of(chart)
    axes.set_yscale("log" if axis.is_log else "linear")
    head_room = (axis.high / axis.low) ** 0.12 if chart.mark is Mark.LINES and axis.is_log else 1.0
    axes.set_ylim(axis.low, axis.high * head_room)
    axes.set_yticks(axis.ticks, [tick_text(tick) for tick in axis.ticks], minor=False)
    axes.minorticks_off()
    longest = max((len(label) for label in chart.labels), default=0)
    is_wide = longest > _SHORT_CHARS and (longest + 2) * len(chart.labels) > _MAX_UPRIGHT_CHARS + 16
    room = _MAX_LABELS if is_wide else max(_MAX_UPRIGHT_CHARS // (longest + 2), 4)
    shown = range(0, len(chart.labels), -(-len(chart.labels) // room) or 1)
    axes.set_xticks(list(shown), [chart.labels[number] for number in shown])
    axes.tick_params(axis="x", labelsize=6.5 if is_wide else 7.5, rotation=30 if is_wide else 0)
    axes.tick_params(axis="y", labelsize=8)
    for label in axes.get_xticklabels() if is_wide else ():
        label.set(ha="right", rotation_mode="anchor")
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x_label, fontsize=8)
    axes.set_ylabel(chart.y_label, fontsize=8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
