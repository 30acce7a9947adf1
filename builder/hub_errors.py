"""What the Hub's clients raise, told as what happened and what to do; a token never gets into a message.

huggingface_hub raises its own errors for HTTP answers, the HTTP library's for a broken connection (httpx in 1.x, httpx2
in 2.x), ValueError for a card that the Hub refuses, RuntimeError around a failed LFS upload, and a plain
ConnectionError for anything inside Xet, with the status in its text only.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

import huggingface_hub
from huggingface_hub import errors as hub
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the library that this version is built on

from ..schemas.errors import StorageError
from . import retries

_TOKEN = re.compile(r"hf_(?:oauth_|jwt_)[\w.-]+|hf_[A-Za-z0-9]{4,}|Bearer \S+")
_SIGNED = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>)]+")
"""An address with a query: those of stores bear a signature that opens them to whoever has it."""

_STATUS = re.compile(r"\((\d{3}) [A-Z]|\b([45]\d\d) (?:Client|Server) Error")
_RESET_AFTER = re.compile(r"\bt=(\d+)")
_READS = ("fetching", "listing", "looking up", "opening", "reading")
"""How a call's `doing` begins where nothing is written: what helps then is not a right to write."""

_PASSING = (408, 429, 500, 502, 503, 504)
FAULTS = (hub.HfHubHTTPError, httpx.HTTPError, ConnectionError, ValueError, RuntimeError, OSError)
"""Classes of what a call of huggingface_hub may raise for a reason that is not our mistake; see `is_ours`."""


class HubError(StorageError):
    """The Hub refused or failed; `status` is that of its answer, None where there was none."""

    def __init__(self, what: str, *, why: str = "", mend: str = "", status: int | None = None) -> None:
        """Keep the status beside the three parts."""
        self.status = status
        super().__init__(what, why=why, mend=mend)


class MissingRepositoryError(HubError):
    """There is no such repository, or none for this account."""


class MissingRevisionError(HubError):
    """The repository has no such branch, tag or commit."""


class MissingFileError(HubError):
    """The repository has no such file."""


class HubConflictError(HubError):
    """Somebody else has changed the repository in the meantime."""


class CardRefusedError(HubError):
    """The Hub does not take the card's front matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """Of which repository, at which endpoint, errors speak."""

    repo: str
    endpoint: str


def root_cause(fault: BaseException) -> BaseException:
    """Return what an upload's RuntimeError was raised from, else the fault itself.

    So too of a download that got no answer, or a 429 or 503, and found no copy in the cache: the client calls it a
    missing entry, though nobody has said that the Hub lacks the file.
    """
    cause = fault.__cause__
    is_wrapped = isinstance(fault, RuntimeError | hub.LocalEntryNotFoundError)
    return cause if is_wrapped and cause is not None else fault


def is_ours(fault: BaseException) -> bool:
    """Tell a bug of ours from what the client raises: it has no classes of its own for some answers."""
    # A BadRequestError is a ValueError as well, and so is what a web page in place of an answer leads to.
    if isinstance(fault, hub.HFValidationError | hub.HfHubHTTPError | json.JSONDecodeError):
        return False
    if isinstance(fault, ValueError):
        return "README.md" not in str(fault) and "LFS" not in str(fault)
    return isinstance(fault, RuntimeError) and fault.__cause__ is None and "xet" not in str(fault).lower()


def status_of(fault: BaseException) -> int | None:
    """Return the HTTP status of the answer that led to `fault`, if there was an answer."""
    fault = root_cause(fault)
    response = getattr(fault, "response", None)
    if response is not None:
        return int(response.status_code)
    match = _STATUS.search(str(fault))
    return int(match[1] or match[2]) if match else None


def is_passing(fault: BaseException) -> bool:
    """Tell whether the same call may succeed later: overload, a broken connection, a server that restarts."""
    fault = root_cause(fault)
    if isinstance(fault, hub.OfflineModeIsEnabled):
        return False
    status = status_of(fault)
    if status is not None:
        return status in _PASSING
    return isinstance(fault, httpx.TransportError | ConnectionError | TimeoutError)


def retry_after_s(fault: BaseException) -> float | None:
    """Return how long the server asks to wait, by Retry-After or the rate limit's reset, if it does."""
    response = getattr(root_cause(fault), "response", None)
    if response is None:
        return None
    asked = retries.retry_after_s(response.headers.get("Retry-After", ""))
    if asked is not None:
        return asked
    match = _RESET_AFTER.search(response.headers.get("RateLimit", ""))
    return float(match[1]) if match else None


def explain(fault: BaseException, doing: str, place: HubPlace) -> HubError:
    """Return `fault`, which came while `doing` something, as an error that says what to do."""
    fault = root_cause(fault)
    status = status_of(fault)
    for kind, cls, why, mend in _rows(place):
        if isinstance(fault, kind):
            return cls(f"{doing} failed", why=why, mend=mend, status=status)
    if isinstance(fault, ValueError) and "README.md" in str(fault):
        why = f"The Hub refuses the card's front matter: {_said(fault)}"
        return CardRefusedError(f"{doing} failed", why=why, mend="Make it anew: eaglehs card DATASET", status=status)
    if status is not None:
        return _by_status(status, _said(fault), doing, place)
    if isinstance(fault, OSError) and fault.filename:
        return HubError(f"{doing} failed", why=f"{fault.filename}: {fault.strerror}", mend="Check the disk")
    lacking = "No JSON" if isinstance(fault, json.JSONDecodeError) else "No answer"
    why = f"{lacking} from {place.endpoint}: {_said(fault)}"
    mend = "Check the network and HF_ENDPOINT; the same command goes on where it stopped"
    return HubError(f"{doing} failed", why=why, mend=mend)


def _rows(place: HubPlace) -> tuple[tuple[type[BaseException], type[HubError], str, str], ...]:
    """Each named error of the client: why it comes, what to do. Subclasses stand first."""
    page = f"{place.endpoint}/datasets/{place.repo}"
    return (
        (hub.LocalTokenNotFoundError, HubError, "There is no token", "Set HF_TOKEN, or run: hf auth login"),
        (hub.OfflineModeIsEnabled, HubError, "HF_HUB_OFFLINE is set", "Unset HF_HUB_OFFLINE"),
        (
            hub.GatedRepoError,
            HubError,
            f"{place.repo} is gated and this account has no access",
            f"Ask for access at {page}, and set HF_TOKEN or run: hf auth login",
        ),
        (
            hub.RepositoryNotFoundError,
            MissingRepositoryError,
            f"There is no dataset {place.repo}, or this account may not see it (the Hub does not tell which)",
            "Check the name; for a private one set HF_TOKEN or run: hf auth login",
        ),
        (
            hub.RevisionNotFoundError,
            MissingRevisionError,
            f"{place.repo} has no such branch, tag or commit",
            f"See what there is at {page}; without @revision it is main",
        ),
        (
            hub.EntryNotFoundError,
            MissingFileError,
            f"{place.repo} has no such file",
            "It is no dataset of eaglehs, or its upload was never finished: run eaglehs push again",
        ),
        (hub.HFValidationError, HubError, "The name of the repository is not valid", "Write it as org/name"),
    )


def _by_status(status: int, said: str, doing: str, place: HubPlace) -> HubError:
    if status == 412:
        why, mend = f"{place.repo} was changed by somebody else meanwhile", "Run the same command again"
        return HubConflictError(f"{doing} failed", why=why, mend=mend, status=status)
    answer = f"The Hub answered {status}: {said}"
    mend = _mend(status, said, place, is_read=doing.startswith(_READS))
    return HubError(f"{doing} failed", why=answer, mend=mend, status=status)


def _mend(status: int, said: str, place: HubPlace, *, is_read: bool) -> str:
    if status == 401:
        is_wrong = "credentials" in said.lower() or "user token" in said.lower()
        if is_wrong or "xet" in said.lower():
            return f"{token_source()} is wrong or has expired: make a new one at {place.endpoint}/settings/tokens"
        return f"Set HF_TOKEN{'' if is_read else ' to a token with write rights'}, or run: hf auth login"
    if status == 403 and is_read:
        return f"{token_source()} may not read {place.repo}: use one that may, or ask its owner for access"
    return {
        400: "The Hub does not take this content; see its answer",
        403: f"{token_source()} needs write rights in {place.repo.partition('/')[0]}, and room in its storage: "
        "make a token of type write, or have yourself added to the organization",
        404: "If the server has no Xet storage, set HF_HUB_DISABLE_XET=1",
        409: "Another name, or the same command again",
        413: "A file or the repository is over the account's limit: smaller shards, or more storage",
        429: "Wait for the rate limit; the same command goes on where it stopped",
    }.get(status, "Try again later; the same command goes on where it stopped")


def token_source() -> str:
    """Say where the token in use comes from, not what it is."""
    return "The token from HF_TOKEN" if os.environ.get("HF_TOKEN") else "The token that `hf auth login` saved"


def without_tokens(text: str) -> str:
    """Return `text` with all tokens replaced, the one in use by its exact value, and no query of an address."""
    own = huggingface_hub.get_token()
    text = text.replace(own, "***") if own else text
    return _SIGNED.sub(r"\1", _TOKEN.sub("***", text))


def _said(fault: BaseException) -> str:
    """Return the server's own words, else the client's, on one line."""
    text = getattr(fault, "server_message", None) or str(fault) or type(fault).__name__
    return without_tokens(" ".join(text.split()))[:300].rstrip(".")
