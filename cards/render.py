"""Facts to text: the card's template, filled from a manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from ..schemas.counts import counted
from ..schemas.manifest import Manifest
from ..schemas.preview import PreviewRecord
from ..schemas.sizes import format_size
from ..schemas.states import Codec, array_specs
from ..schemas.statistics import DatasetStatistics
from ..schemas.verified import Verified
from .charts import CARD_CHARTS, charts
from .facts import card_facts
from .features import front_matter
from .layers import layer_names, server_ids

_TEMPLATE = Path(__file__).with_name("card.md")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardExtras:
    """What a card tells beside its manifest, each where there is such."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """The publisher's terms (cards/licenses.py): front matter lines that stay."""

    statistics: DatasetStatistics | None = None
    """The report's figures; the charts then lie in plots/."""

    preview: PreviewRecord | None = None
    verified: Verified | None = None
    """Samples that were computed again by the model, without a fault."""


def render_card(manifest: Manifest, extras: CardExtras | None = None) -> str:
    """Return the text of README.md; the same manifest and extras always give the same text."""
    extras = extras or CardExtras()
    facts = card_facts(manifest)
    input_of, output_of = server_ids(manifest.layers)
    specs = array_specs(manifest.layers, manifest.model.hidden_size, manifest.codec)
    states = [spec for spec in specs if spec.is_state]
    drawn = charts(manifest, extras.statistics) if extras.statistics else ()
    return (
        _environment()
        .from_string(_TEMPLATE.read_text(encoding="utf-8"))
        .render(
            front_matter=front_matter(manifest, facts, extras.kept, extras.preview),
            terms=extras.kept,
            facts=facts,
            manifest=manifest,
            states=states,
            is_coded=manifest.codec is not Codec.PLAIN,
            statistics=extras.statistics,
            charts=[chart for chart in drawn if chart.name in CARD_CHARTS],
            preview=extras.preview,
            verified=extras.verified,
            names=layer_names(manifest.layers, manifest.model.num_layers),
            input_of=input_of,
            output_of=output_of,
        )
    )


def plain(value: object) -> str:
    """Return `value` as Markdown text that shows as it is: names from outside may hold pipes, stars or line ends."""
    text = str(value).encode("utf-8", "replace").decode()  # a path's undecodable bytes must not stop the writing
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=False,  # noqa: S701 - Markdown, not HTML; `plain` escapes what comes from outside
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "size": format_size, "counted": counted}
    return environment
