"""The card before it is sent: is it one that the Hub and `datasets` take, and is it of this dataset?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..schemas.atomic import write_atomically
from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from ..schemas.manifest import Manifest
from ..schemas.type_names import type_name

_HEAD = re.compile(r"---\r?\n(.*?\r?\n)---\r?\n", re.DOTALL)
_LICENSE_LINES = re.compile(r"^license(?:_name|_link)?:.*\n(?:[ \t-].*\n)*", re.MULTILINE)
"""With the lines that go on below: a license may be a list."""

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")


class CardError(DataError):
    """README.md is missing, is not valid, or is of another dataset."""


class MissingLicenseError(UsageError):
    """Nobody has said under which terms the dataset may be used."""


def check_card(card: Path, manifest: Manifest) -> None:
    """Refuse a card that the Hub would refuse late, or that would make `load_dataset` fail or read something else.

    Raises:
        CardError: no card, no YAML, no `configs` that name the shards, or another number of samples.
        MissingLicenseError: it names no license.
    """
    head = _read_head(card)
    if "data/" not in str(head.get("configs", "")):
        raise CardError(
            f"{card} does not say which files are the dataset (configs: data_files:)",
            why="load_dataset would guess, and might read the index",
            mend=f"Make it anew: eaglehs card {card.parent}",
        )
    found = _num_examples(head)
    if found is not None and found != manifest.totals.num_samples:
        raise CardError(
            f"{card} speaks of {counted(found, 'sample')}, the manifest of {manifest.totals.num_samples:,}",
            why="The dataset was packed again since",
            mend=f"Make it anew: eaglehs card {card.parent}",
        )
    if not head.get("license"):
        raise MissingLicenseError(
            f"{card} names no license",
            why="States carry the terms of the model and of the prompts; those who find the dataset must know them",
            mend="Give --license, such as apache-2.0, cc-by-4.0, or other with --license-name",
        )


def set_license(card: Path, license_id: str, *, name: str = "", link: str = "") -> None:
    """Write the license into the card's front matter, in place of another with its name and link; all else stays.

    Raises:
        CardError: the card is missing or not valid.
        UsageError: this is no license id of the Hub's form.
    """
    if not _LICENSE.fullmatch(license_id):
        raise UsageError(f"{license_id!r} is no license id", mend="Give one such as apache-2.0, cc-by-4.0 or other")
    _read_head(card)
    text = card.read_text(encoding="utf-8")
    match = _HEAD.match(text)
    assert match is not None  # _read_head has found it
    given = {"license": license_id, "license_name": name, "license_link": link}
    lines = yaml.safe_dump({key: value for key, value in given.items() if value}, sort_keys=False, allow_unicode=True)
    changed = f"---\n{lines}{_LICENSE_LINES.sub('', match[1])}---\n{text[match.end() :]}"
    if changed != text:
        write_atomically(card, changed.encode())


def _read_head(card: Path) -> dict[str, Any]:
    mend = f"Make it anew: eaglehs card {card.parent}"
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CardError(f"{card} can't be read ({type(fault).__name__})", mend=mend) from None
    match = _HEAD.match(text)
    if match is None:
        raise CardError(f"{card} does not begin with YAML between two lines of ---", mend=mend)
    try:
        head = yaml.safe_load(match[1])
    except yaml.YAMLError as fault:
        raise CardError(
            f"{card}: its front matter is no YAML: {' '.join(str(fault).split())[:200]}", mend=mend
        ) from None
    if not isinstance(head, dict):
        raise CardError(f"{card}: its front matter is {type_name(head)}, not a list of fields", mend=mend)
    return head


def _num_examples(head: dict[str, Any]) -> int | None:
    """Return how many samples the card says are in the split `train`, if it says so."""
    info = head.get("dataset_info")
    blocks = info if isinstance(info, list) else [info]
    named = [block for block in blocks if isinstance(block, dict) and block.get("config_name", "default") == "default"]
    splits = named[0].get("splits", []) if named else []
    counts = [split.get("num_examples") for split in splits if isinstance(split, dict) and split.get("name") == "train"]
    return counts[0] if counts and isinstance(counts[0], int) else None
