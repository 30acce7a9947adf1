"""Under which terms a dataset may be used: what the publisher gives, in the words that the Hub knows.

Source of the ids: the Hub's documentation, "Licenses". An id that is not in the list is refused by the Hub, late.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..schemas.errors import UsageError

OTHER = "other"

_IDS = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0
openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
other
"""

LICENSE_IDS = frozenset(_IDS.split())

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
"""The Hub's card specification (hub-docs, datasetcard.md) asks for "an id" like `my-license-1.0` and says no more. This
is a form that it takes for sure; it may take others, so a card that was written by hand is not held to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTerms:
    """What the publisher says of terms; an empty field keeps what the card before it said."""

    license: str = ""
    """An id of `LICENSE_IDS`."""

    license_name: str = ""
    """What `other` is called, in the form of an id."""

    license_link: str = ""
    model_terms: str = ""
    """The target model's license: the states are made with it."""

    prompts_terms: str = ""
    """The prompts' terms: their text can be read back from the ids."""


TERM_KEYS = ("license", "license_name", "license_link", "model_terms", "prompts_terms")
"""Front matter lines that are the publisher's, in their order; a new card keeps them."""


def merge_terms(kept: Mapping[str, str], terms: CardTerms) -> dict[str, str]:
    """Return the publisher's lines: those of `terms`, else those that the card had.

    Raises:
        UsageError: an id that the Hub does not know; `other` without a name; a name without `other`; a new name that
            has not the form of an id.
    """
    given = {name: str(getattr(terms, name)).strip() for name in TERM_KEYS}
    if given["license"]:  # another license must not keep the name and link of the one before it
        kept = {name: value for name, value in kept.items() if not name.startswith("license")}
    merged = {name: given[name] or kept.get(name, "") for name in TERM_KEYS}
    if terms != CardTerms():
        faults = list(license_faults(merged))
        if merged["license"] == OTHER and not merged["license_name"]:
            faults.append("the license `other` needs a name (--license-name): nobody can tell which it is")
        if given["license_name"] and not _NAME.fullmatch(given["license_name"]):
            faults.append(
                f"the license's name {given['license_name'][:60]!r} has not the form of an id: lowercase letters, "
                f"digits, '-', '.' and '_', such as {_as_name(given['license_name'])}"
            )
        if faults:
            raise UsageError(faults[0], mend="See https://huggingface.co/docs/hub/repositories-licenses for the ids")
    return {name: value for name, value in merged.items() if value}


def _as_name(text: str) -> str:
    """Return the id that is nearest to a name in words."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")[:60] or "my-license-1.0"


def license_faults(head: Mapping[str, object]) -> tuple[str, ...]:
    """Return what is wrong with the license lines of a card's front matter."""
    found = head.get("license")
    if not found:
        named = head.get("license_name") or head.get("license_link")
        return ("a license's name or link without --license other",) if named else ()
    if not isinstance(found, str) or found not in LICENSE_IDS:
        return (
            f"{str(found)[:60]!r} is no license id of the Hub that is known here; give another as `other` with a name",
        )
    return ()
