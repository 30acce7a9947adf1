"""The card as a file: manifest.json, and what else lies beside it, to README.md, whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

from ..schemas.atomic import write_atomically
from ..schemas.codec import read_record
from ..schemas.errors import RecordError, UsageError
from ..schemas.manifest import DatasetFolder, Manifest
from ..schemas.preview import PreviewFolder, PreviewRecord
from ..schemas.statistics import DatasetStatistics, PlotsFolder, shards_fingerprint
from ..schemas.verified import Verified, manifest_sha256, verified_path
from .charts import CARD_CHARTS
from .features import read_kept
from .licenses import CardTerms, merge_terms
from .render import CardExtras, render_card

R = TypeVar("R")


def write_card(dataset: Path, terms: CardTerms | None = None) -> Path:
    """Write README.md of the packed dataset in the folder `dataset`, and return its path.

    Terms that the publisher put into an earlier card stay where `terms` gives no others; all else is made anew from
    manifest.json, and from statistics, preview and verification where these are of this packing.

    Raises:
        UsageError: `dataset` holds no manifest.json, or `terms` can't be.
        RecordError: its manifest.json is damaged or of another version.
    """
    folder = DatasetFolder(dataset)
    if not folder.manifest.is_file():
        raise UsageError(
            f"{dataset} holds no {folder.manifest.name}, so it is no packed dataset",
            mend="Give the folder that `eaglehs pack` wrote",
        )
    write_atomically(folder.card, _rendered(folder, terms or CardTerms()).encode())
    return folder.card


def is_report_stale(dataset: Path) -> bool:
    """Tell whether a report lies in the dataset that was made of other shards than are there now."""
    folder = DatasetFolder(dataset)
    found = _read_if_good(DatasetStatistics, PlotsFolder(folder.root / "plots").statistics)
    return found is not None and found.shards_sha256 != shards_fingerprint(read_record(Manifest, folder.manifest))


def is_as_written(dataset: Path) -> bool:
    """Tell whether the card is what `write_card` would write now: nobody has changed its text by hand."""
    folder = DatasetFolder(dataset)
    try:
        return folder.card.read_text(encoding="utf-8") == _rendered(folder, CardTerms())
    except (OSError, UnicodeDecodeError, RecordError):
        return False


def kept_terms(folder: DatasetFolder) -> dict[str, str]:
    """Return the terms that a dataset's card names now; none where there is no card."""
    return read_kept(folder.card.read_text(encoding="utf-8", errors="replace")) if folder.card.is_file() else {}


def _rendered(folder: DatasetFolder, terms: CardTerms) -> str:
    manifest = read_record(Manifest, folder.manifest)
    extras = CardExtras(
        kept=merge_terms(kept_terms(folder), terms),
        statistics=_statistics(folder, manifest),
        preview=_preview(folder, manifest),
        verified=kept_verification(folder),
    )
    return render_card(manifest, extras)


def _statistics(folder: DatasetFolder, manifest: Manifest) -> DatasetStatistics | None:
    """Return the report's figures if they are of these shards and the images are all there."""
    plots = PlotsFolder(folder.root / "plots")
    found = _read_if_good(DatasetStatistics, plots.statistics)
    if found is None or found.shards_sha256 != shards_fingerprint(manifest):
        return None
    return found if all(plots.image(name).is_file() for name in CARD_CHARTS) else None


def _preview(folder: DatasetFolder, manifest: Manifest) -> PreviewRecord | None:
    """Return the preview's record if it is of these shards and of the tar that is there; `verify` names what is not."""
    preview = PreviewFolder(folder.root)
    found = _read_if_good(PreviewRecord, preview.record)
    if found is None or found.shards_sha256 != shards_fingerprint(manifest) or not preview.shard.is_file():
        return None
    is_same = hashlib.sha256(preview.shard.read_bytes()).hexdigest() == found.sha256
    return found if is_same else None


def kept_verification(folder: DatasetFolder) -> Verified | None:
    """Return what `verify --model --write-report` found of this very manifest; None where it found faults."""
    found = _read_if_good(Verified, verified_path(folder.root))
    is_of_this = found is not None and found.manifest_sha256 == manifest_sha256(folder.manifest)
    return found if found is not None and is_of_this and not found.faults else None


def _read_if_good(cls: type[R], path: Path) -> R | None:
    """Return the record; None where it is missing or of another version: the card can do without it."""
    try:
        return read_record(cls, path)
    except RecordError:
        return None
