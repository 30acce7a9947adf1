"""Measured figures to one page for eyes: dataset/plots/report.html, and the charts as PNG beside it.

The page is whole by itself: no script, font, image or style of elsewhere, and a content policy that forbids any, so it
works from `file://` and on a machine without a network. Text from outside is escaped by the template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ..schemas.atomic import write_atomically
from ..schemas.codec import write_record
from ..schemas.counts import counted
from ..schemas.manifest import Manifest
from ..schemas.sizes import format_size
from ..schemas.statistics import DatasetStatistics, PlotsFolder, SampleExcerpt
from ..schemas.verified import Verified
from .charts import charts
from .facts import card_facts
from .plots import write_plots
from .svg import chart_svg

_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token of the sample browser."""

    text: str
    id: int
    is_trained: bool
    ends_line: bool
    """Whether its text ends with a line break, so that the page breaks there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportExtras:
    """What a page tells beside manifest and statistics, each where there is such."""

    excerpts: tuple[SampleExcerpt, ...] = ()
    """Samples to browse."""

    verified: Verified | None = None
    """Samples that were computed again by the model, without a fault."""


def write_report(
    folder: PlotsFolder, manifest: Manifest, statistics: DatasetStatistics, extras: ReportExtras
) -> tuple[Path, ...]:
    """Write PNGs, statistics.json and report.html into `folder`, and return the paths; the page comes last.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    folder.root.mkdir(parents=True, exist_ok=True)
    images = write_plots(charts(manifest, statistics), folder)
    write_record(folder.statistics, statistics)
    write_atomically(folder.page, render_report(manifest, statistics, extras).encode())
    return (*images, folder.statistics, folder.page)


def render_report(manifest: Manifest, statistics: DatasetStatistics, extras: ReportExtras | None = None) -> str:
    """Return the page's HTML; the same figures always give the same text."""
    extras = extras or ReportExtras()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"size": format_size, "counted": counted}
    environment.filters["number"] = _number
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        facts=card_facts(manifest),
        manifest=manifest,
        statistics=statistics,
        plots=[(chart, chart_svg(chart)) for chart in charts(manifest, statistics)],
        verified=extras.verified,
        samples=[
            {"excerpt": excerpt, "tokens": list(_tokens(excerpt)), "norms": _rounded(excerpt)}
            for excerpt in extras.excerpts
        ],
        state_names=[state.name for state in statistics.states],
        is_part=statistics.num_measured < statistics.num_samples,
        has_text=any(excerpt.texts is not None for excerpt in extras.excerpts),
    )


def _tokens(excerpt: SampleExcerpt) -> Iterator[ShownToken]:
    texts = excerpt.texts if excerpt.texts is not None else tuple(map(str, excerpt.input_ids))
    for text, token, mask in zip(texts, excerpt.input_ids, excerpt.loss_mask, strict=True):
        shown = _visible(text)
        yield ShownToken(
            text=shown, id=token, is_trained=bool(mask), ends_line=excerpt.texts is not None and "\n" in text
        )


def _visible(text: str) -> str:
    """Return `text` with blanks and control characters that can be seen."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥").encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in shown) or "∅"


def _rounded(excerpt: SampleExcerpt) -> dict[str, list[float]]:
    return {name: [float(f"{value:.4g}") for value in values] for name, values in excerpt.norms.items()}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
