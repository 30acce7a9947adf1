"""Where a dataset is on the Hub: `org/name`, or `hf://datasets/org/name@revision` where folders are meant as well."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..schemas.errors import UsageError

HUB_SCHEME = "hf://"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""What a dataset on the Hub is called where a folder may be meant as well."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """A dataset repository and a branch, tag or commit of it."""

    repo: str
    revision: str | None = None
    """None for `main`."""

    def __str__(self) -> str:
        """Return the address as it is written in a command."""
        return f"{HUB_SCHEME}datasets/{self.repo}" + (f"@{self.revision}" if self.revision else "")


def is_hub_address(text: str) -> bool:
    """Tell whether `text` means the Hub and not a folder."""
    return text.startswith(HUB_SCHEME)


def parse_hub_address(text: str) -> HubAddress:
    """Return the address that `hf://datasets/org/name[@revision]` names.

    Raises:
        UsageError: it has another form.
    """
    rest = text.removeprefix(HUB_SCHEME)
    name, _, revision = rest.removeprefix("datasets/").partition("@")
    if not is_hub_address(text) or not rest.startswith("datasets/") or not _REPO.fullmatch(name):
        raise UsageError(
            f"{text!r} names no dataset of the Hub",
            mend="Write hf://datasets/org/name or hf://datasets/org/name@revision",
        )
    return HubAddress(repo=name, revision=revision or None)


def check_repo_name(name: str) -> str:
    """Return `name` if it has the form `org/name`.

    Raises:
        UsageError: it has another form.
    """
    if not _REPO.fullmatch(name) or ".." in name or "--" in name or name.endswith((".git", "-", ".")):
        raise UsageError(
            f"{name!r} can't be the name of a dataset on the Hub",
            mend="Write it as org/name, of letters, digits, '-', '_' and '.'",
        )
    return name
