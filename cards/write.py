"""The card as a file: manifest.json to README.md, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ..schemas.atomic import write_atomically
from ..schemas.codec import read_record
from ..schemas.errors import UsageError
from ..schemas.manifest import DatasetFolder, Manifest
from .features import read_kept
from .render import render_card


def write_card(dataset: Path) -> Path:
    """Write README.md of the packed dataset in the folder `dataset`, and return its path.

    A license that the publisher put into an earlier card stays; all else is made anew from manifest.json.

    Raises:
        UsageError: `dataset` holds no manifest.json.
        RecordError: its manifest.json is damaged or of another version.
    """
    folder = DatasetFolder(dataset)
    if not folder.manifest.is_file():
        raise UsageError(
            f"{dataset} holds no {folder.manifest.name}, so it is no packed dataset",
            mend="Give the folder that `eaglehs pack` wrote",
        )
    manifest = read_record(Manifest, folder.manifest)
    kept = read_kept(folder.card.read_text(encoding="utf-8", errors="replace")) if folder.card.is_file() else {}
    write_atomically(folder.card, render_card(manifest, kept).encode())
    return folder.card
