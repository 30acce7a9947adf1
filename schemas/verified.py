"""Numbers held against the model again: `dataset/_index/verified.json`, written by `verify --write-report`. Version 1.

It is true of one packing of one dataset: `manifest_sha256` is that of the manifest.json which it was made beside, and
the card shows it only while they are the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

VERIFIED_FILENAME = "verified.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReading:
    """How near one stored state comes to what the model computes, over the rows of all samples that were checked.

    Errors are relative: |stored - computed| / |computed|.
    """

    state: str
    error_median: float
    """Median over rows."""

    error_total: float
    """All rows as one matrix; a few rows whose experts flip dominate it in a mixture of experts."""

    own_median: float | None
    """The same median of transformers in bfloat16; None where float32 did not fit into memory."""

    allowed: float
    """The most that `error_median` may be."""

    nearest: str
    """The state of the model that is nearest by the median: `hidden_states[k]`, `final` or another by name."""

    next_best: str
    next_best_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The contents of verified.json."""

    KIND: ClassVar[str] = "eaglehs.verified"
    VERSION: ClassVar[int] = 1

    manifest_sha256: str
    """Of the dataset's manifest.json; empty for a run."""

    checked_at: str
    """UTC, ISO 8601."""

    eaglehs_version: str
    model: str
    revision: str
    reference: str
    """What computed the states that were compared with: package, versions, precision, device."""

    seed: int
    max_tokens: int
    """Rows of each sample that were compared, from its first on."""

    samples: tuple[str, ...]
    """Keys, in order."""

    num_rows: int
    states: tuple[StateReading, ...]
    num_next_tokens: int
    """Samples with a stored next token."""

    num_next_agree: int
    """Of those, the ones whose last `final` row the LM head gives this token first, or level with the first."""

    same_token_share: float
    """Share of rows whose likeliest next token is that of the computed final state."""

    own_same_token_share: float | None
    """The same of transformers in bfloat16."""

    faults: tuple[str, ...]


def verified_path(dataset: Path) -> Path:
    """Return where the record of the dataset in the folder `dataset` lies."""
    return dataset / "_index" / VERIFIED_FILENAME


def manifest_sha256(manifest: Path) -> str:
    """Return the SHA-256 of a manifest.json."""
    return hashlib.sha256(manifest.read_bytes()).hexdigest()
