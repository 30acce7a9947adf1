"""Facts to text: the card's template, filled from a manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import jinja2

from ..schemas.manifest import Manifest
from ..schemas.sizes import format_size
from ..schemas.states import array_specs
from .facts import card_facts
from .features import front_matter
from .layers import layer_names, server_ids

_TEMPLATE = Path(__file__).with_name("card.md")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


def render_card(manifest: Manifest, kept: Mapping[str, str] | None = None) -> str:
    """Return the text of README.md; the same manifest always gives the same text.

    `kept` are front matter lines of the card before it that stay (see `features.read_kept`).
    """
    facts = card_facts(manifest)
    input_of, output_of = server_ids(manifest.layers)
    states = [spec for spec in array_specs(manifest.layers, manifest.model.hidden_size) if spec.is_state]
    return (
        _environment()
        .from_string(_TEMPLATE.read_text(encoding="utf-8"))
        .render(
            front_matter=front_matter(manifest, facts, kept or {}),
            has_license="license" in (kept or {}),
            facts=facts,
            manifest=manifest,
            states=states,
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
    environment.filters |= {"plain": plain, "size": format_size}
    return environment
