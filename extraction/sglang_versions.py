"""Which releases of SGLang the capture is known to work with, and how that is known: the one table of it.

A release that is not here is refused by name, also a newer one: the hooks rest on names inside SGLang that any release
may move (PATCHES.md). `--allow-untested` tries it; each dump is checked all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum


class Known(StrEnum):
    """How it is known that capture works."""

    RUN = "run"
    """A real server of it ran, and its rows were held against transformers."""

    READ = "read"
    """Everything that is hooked or read was found in its source, as in a release that was run."""


RELEASES: Mapping[tuple[int, int, int], Known] = {
    (0, 5, 11): Known.RUN,
    (0, 5, 12): Known.READ,
    (0, 5, 13): Known.READ,
    (0, 5, 14): Known.READ,
    (0, 5, 15): Known.READ,
    (0, 5, 16): Known.RUN,
    (0, 5, 17): Known.READ,
    (0, 5, 18): Known.READ,
    (0, 5, 19): Known.READ,
    (0, 5, 20): Known.RUN,
    (0, 5, 21): Known.READ,
    (0, 5, 22): Known.READ,
    (0, 5, 23): Known.RUN,
}
"""Release -> how it is known. Post-releases go with their release."""

UNTESTED_MEND = "or try it with --allow-untested: every dump is checked all the same"


def parse_version(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version, `0.5.16.dev3+g1` as (0, 5, 16); empty where there is none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def is_supported(version: tuple[int, ...]) -> bool:
    """Tell whether capture is known to work with this SGLang."""
    return version[:3] in RELEASES


def supported_range() -> str:
    """Return the supported versions in words."""
    return f"{_text(min(RELEASES))} to {_text(max(RELEASES))}"


def untested_note(text: str) -> str:
    """Return what the user is told of a release that is used untested."""
    return f"warning: SGLang {text} is untested with this eaglehs ({supported_range()} are); watch for failed samples"


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
