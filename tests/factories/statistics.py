"""Figures of a dataset, for what draws them and needs no shards."""

from __future__ import annotations

from typing import Any

from eaglehs.cards.render import CardExtras
from eaglehs.schemas.preview import PreviewRecord
from eaglehs.schemas.statistics import (
    ChannelStatistics,
    DatasetStatistics,
    Histogram,
    NeighbourStatistics,
    SampleExcerpt,
    Spread,
    StateStatistics,
    shards_fingerprint,
)
from eaglehs.schemas.verified import StateReading, Verified

from tests.factories.manifests import make_manifest

NORMS = {"layer_3": 1.5, "layer_31": 12.25, "layer_59": 80.0, "final": 33.0}


def make_statistics(**changes: Any) -> DatasetStatistics:
    """Return the figures of `make_manifest`'s dataset: three samples, all measured; `changes` replace fields."""
    fields: dict[str, Any] = {
        "shards_sha256": shards_fingerprint(make_manifest()),
        "num_samples": 3,
        "num_measured": 3,
        "num_measured_tokens": 42,
        "lengths": Histogram(edges=(10.0, 12.0, 14.0, 16.0), counts=(0, 2, 1)),
        "shares": Histogram(edges=(0.0, 0.5, 1.0), counts=(1, 2)),
        "states": tuple(make_state(name, norm) for name, norm in NORMS.items()),
        "neighbours": (
            make_neighbours("layer_3", "layer_31", 0.5),
            make_neighbours("layer_31", "layer_59", 0.875),
            make_neighbours("layer_59", "final", 0.25),
        ),
    }
    return DatasetStatistics(**(fields | changes))


def make_state(name: str, norm: float, *, ratio: float = 1500.0) -> StateStatistics:
    """Return a state whose norms lie around `norm`, with one massive channel and one that is none."""
    channels = (
        ChannelStatistics(channel=5, mean_magnitude=2.0, max_magnitude=ratio / 10, ratio=ratio, key="p1", row=0),
        ChannelStatistics(channel=7, mean_magnitude=0.5, max_magnitude=0.75, ratio=7.5, key="p0", row=3),
    )
    return StateStatistics(
        name=name,
        norms=spread_around(norm),
        norms_by_position=(norm * 4, norm, norm, 0.0, norm),
        median_magnitude=0.1,
        num_outlier_channels=1,
        num_massive_channels=1,
        top_channels=channels,
    )


def make_neighbours(first: str, second: str, cosine: float) -> NeighbourStatistics:
    return NeighbourStatistics(first=first, second=second, cosine=spread_around(cosine, reach=0.1))


def spread_around(middle: float, *, reach: float = 0.5) -> Spread:
    return Spread(
        lowest=middle * (1 - reach),
        p5=middle * (1 - reach / 2),
        p25=middle * (1 - reach / 4),
        median=middle,
        p75=middle * (1 + reach / 4),
        p95=middle * (1 + reach / 2),
        highest=middle * (1 + reach),
        mean=middle,
    )


def make_excerpt(key: str = "p0", **changes: Any) -> SampleExcerpt:
    """Return four tokens of a sample of six, the last two of them trained on."""
    fields: dict[str, Any] = {
        "key": key,
        "id": key,
        "num_tokens": 6,
        "num_trainable": 3,
        "input_ids": (11, 22, 33, 44),
        "loss_mask": (0, 0, 1, 1),
        "norms": {name: (norm, norm * 2, norm / 3, norm) for name, norm in NORMS.items()},
    }
    return SampleExcerpt(**(fields | changes))


def make_preview(**changes: Any) -> PreviewRecord:
    """Return the record of a preview of two samples with text."""
    fields: dict[str, Any] = {
        "shards_sha256": shards_fingerprint(make_manifest()),
        "num_samples": 2,
        "max_tokens": 2048,
        "has_text": True,
        "content_bytes": 321,
        "size_bytes": 10_240,
        "sha256": "e" * 64,
    }
    return PreviewRecord(**(fields | changes))


def make_extras() -> CardExtras:
    """Return everything that a card can tell beside its manifest."""
    terms = {
        "license": "other",
        "license_name": "acme-open",
        "license_link": "https://example.org/terms",
        "model_terms": "Modified MIT",
        "prompts_terms": "cc-by-4.0",
    }
    return CardExtras(kept=terms, statistics=make_statistics(), preview=make_preview(), verified=make_verified())


def make_verified(**changes: Any) -> Verified:
    """Return a verification of two samples without a fault."""
    fields: dict[str, Any] = {
        "manifest_sha256": "f" * 64,
        "checked_at": "2026-01-03T04:05:06+00:00",
        "eaglehs_version": "0.1.0",
        "model": "moonshotai/Kimi-K2.5",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "reference": "transformers 5.0 in float32 on cpu",
        "seed": 0,
        "max_tokens": 512,
        "samples": ("p0", "p2"),
        "num_rows": 38,
        "states": tuple(
            StateReading(
                state=name,
                error_median=0.004,
                error_total=0.005,
                own_median=0.0045,
                allowed=0.02,
                nearest="final" if name == "final" else f"hidden_states[{name[6:]}]",
                next_best="hidden_states[60]",
                next_best_error=0.4,
            )
            for name in NORMS
        ),
        "num_next_tokens": 2,
        "num_next_agree": 2,
        "same_token_share": 0.974,
        "own_same_token_share": None,
        "faults": (),
    }
    return Verified(**(fields | changes))
