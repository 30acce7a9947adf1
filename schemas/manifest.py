"""Manifest: `dataset/manifest.json`, what is in a packed dataset and how it was made. Format versions 1 and 2.

dataset/README.md               the card
dataset/manifest.json           this record, written last but for the card
dataset/_index/samples.parquet  see schemas/index.py
dataset/data/train-00000.tar    see schemas/states.py and schemas/sample.py
dataset/plots/                  optional; see schemas/statistics.py
dataset/preview/                optional; see schemas/preview.py

Version 2 has `codec`; a dataset whose states are plain is written as version 1. It is published, so model, prompts and
engine are those of run.json without what is of one machine alone: schemas/published.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from .codec import since
from .run import EngineFacts, ModelFacts, PromptFacts
from .states import CAPTURE, Codec

MANIFEST_FILENAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One finished shard, as the manifest lists it."""

    name: str
    """Path within the dataset, with slashes: `data/train-00000.tar`."""

    num_samples: int
    num_tokens: int
    size_bytes: int
    sha256: str
    """Over the whole file; what the Hub keeps for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all shards."""

    num_samples: int
    num_tokens: int
    num_trainable: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of manifest.json."""

    KIND: ClassVar[str] = "eaglehs.manifest"
    VERSION: ClassVar[int] = 2
    OLDEST: ClassVar[int] = 1

    run_id: str
    created_at: str
    """When the run was made: UTC, ISO 8601. The same run packs to the same bytes at any time."""

    eaglehs_version: str
    model: ModelFacts
    layers: tuple[int, ...]
    prompts: PromptFacts
    engine: EngineFacts
    shard_size_bytes: int
    shuffle_seed: int | None
    failed: dict[str, int]
    """Reason -> samples of the run that are not in the dataset."""

    state_norms: dict[str, float]
    """State -> mean over samples of the mean row norm, weighted by tokens."""

    totals: Totals
    shards: tuple[ShardEntry, ...]
    capture: str = CAPTURE
    dtype: str = "bfloat16"
    codec: Codec = field(default=Codec.PLAIN, metadata=since(2))
    """How the states are stored."""


@dataclass(frozen=True, slots=True)
class DatasetFolder:
    """The paths of a packed dataset."""

    root: Path

    @property
    def manifest(self) -> Path:
        """manifest.json."""
        return self.root / MANIFEST_FILENAME

    @property
    def index(self) -> Path:
        """_index/samples.parquet; `datasets` ignores folders with a leading underscore."""
        return self.root / "_index" / "samples.parquet"

    @property
    def card(self) -> Path:
        """README.md."""
        return self.root / "README.md"

    @property
    def data(self) -> Path:
        """The folder of the shards."""
        return self.root / "data"

    def shard(self, name: str) -> Path:
        """The file of a shard, by its name in the manifest."""
        return self.root / name


def shard_name(number: int) -> str:
    """Return the name of shard `number`, counted from 0."""
    return f"data/train-{number:05d}.tar"
