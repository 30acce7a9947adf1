"""Preview: a few samples without states, small enough for the Hub's viewer and for a look by hand. Format version 1.

dataset/preview/preview-00000.tar   the config `preview`, split `train`; a tar, since one repository has one file kind
dataset/_index/preview.json         this record

Members of a sample, in this order; each is a column of its own in stock `datasets`:

    <key>.id.txt              the user's id
    <key>.num_tokens.json     a number: of the whole sample
    <key>.num_trainable.json  a number: of the whole sample
    <key>.input_ids.json      list of numbers: the first `max_tokens`
    <key>.loss_mask.json      list of 0 and 1: the same rows
    <key>.text.txt            those ids as text; only where a tokenizer was given

The tar is deterministic: fixed owner, mode and time, the dataset's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

PREVIEW_SHARD = "preview/preview-00000.tar"
PREVIEW_MEMBERS = ("id.txt", "num_tokens.json", "num_trainable.json", "input_ids.json", "loss_mask.json")
PREVIEW_TEXT = "text.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRecord:
    """The contents of `_index/preview.json`: written after the tar, so the tar is whole where this is."""

    KIND: ClassVar[str] = "eaglehs.preview"
    VERSION: ClassVar[int] = 1

    shards_sha256: str
    """`schemas.statistics.shards_fingerprint` of the dataset that it was taken from."""

    num_samples: int
    max_tokens: int
    has_text: bool
    content_bytes: int
    """All members, without tar headers."""

    size_bytes: int
    sha256: str
    """Over the tar."""


@dataclass(frozen=True, slots=True)
class PreviewFolder:
    """The paths of a dataset's preview."""

    root: Path
    """Of the dataset."""

    @property
    def shard(self) -> Path:
        """preview/preview-00000.tar."""
        return self.root / PREVIEW_SHARD

    @property
    def record(self) -> Path:
        """_index/preview.json."""
        return self.root / "_index" / "preview.json"
