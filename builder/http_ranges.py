"""Ranges of files on an HTTP server, into memory: redirects, retries, resets in the middle of a body.

A range goes on where it broke off. Where a file is redirected to (the Hub hands out signed addresses of a store) is
kept for the ranges that follow, and asked for anew when it has expired; a token never follows to another host.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urljoin

from ..schemas.counts import counted
from ..schemas.errors import StorageError
from .http_connection import Connections, origin_of, shown
from .retries import MAX_RETRY_AFTER_S, Patience, RetryPolicy, retry_after_s
from .shard_source import DatasetMismatchError

_SLICE_BYTES = 1024 * 1024
"""What a reset can lose at most."""

GO_ON = "Go on from the stream's state_dict once the server answers"
_LONG_WAIT_S = 30
"""A loop that stands still for longer is told why."""

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that may be another one in a while."""

_SAFE = "%/:?#[]@!$&'()*+,;=~"
"""What stays as it is in a Location; blanks and letters of other alphabets are what some servers leave in it."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class RemoteReadError(StorageError):
    """A range of a remote file can't be had."""


class RemoteMissingError(StorageError):
    """The server has no such file, or does not show it to us."""


class RemoteRefusedError(RemoteMissingError):
    """The server answers 401 or 403: it wants a login, another one, or to be asked for access first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFile:
    """A file on a server."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to the server of `url` alone."""

    size_bytes: int | None = None
    """What the manifest says; None where it is not known."""


class _TryAgainError(Exception):
    """The same request may work later."""

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(what)


_FAULTS = (_TryAgainError, OSError, http.client.HTTPException)
"""What a try can end in."""


class RangeClient:
    """Reads ranges, from any number of threads."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        """Connect to nothing yet."""
        self._policy = policy or RetryPolicy()
        self._connections = Connections(self._policy.timeout_s)
        self._moved: dict[str, str] = {}
        """URL -> where it is redirected to."""
        self._is_closed = threading.Event()

    def read_into(self, file: HttpFile, offset: int, target: memoryview) -> None:
        """Fill `target` from byte `offset` of the file.

        Raises:
            RemoteMissingError: there is no such file, or it is not for us.
            DatasetMismatchError: its size is not the manifest's.
            RemoteReadError: the server refuses, or fails again and again.
        """
        patience = Patience(self._policy, self._is_closed)
        done = 0
        while done < len(target):
            try:
                for part in self._body(file, offset + done, target[done:]):
                    done += part
                    patience.note_progress()
            except _FAULTS as fault:
                if not self._waits_out(file, fault, patience):
                    place = f"bytes {offset} to {offset + len(target)}"
                    what = f"{_reason(fault)}, after {counted(done, 'byte')}"
                    if not isinstance(fault, ssl.SSLCertVerificationError):
                        what += f" and {counted(patience.failures, 'try', 'tries')} in a row"
                    raise unread(file.url, place, what, mend=GO_ON) from None

    def fetch(self, file: HttpFile) -> bytes:
        """Return a small file whole; errors as `read_into`."""
        patience = Patience(self._policy, self._is_closed)
        while True:
            try:
                response = self._answer(file, {})
                content = response.read()
                self._check_whole(response, content)
            except _FAULTS as fault:
                if not self._waits_out(file, fault, patience):
                    is_refused = isinstance(fault, ssl.SSLCertVerificationError)
                    mend = (
                        "Check the address and its certificate" if is_refused else "Try again once the server answers"
                    )
                    raise unread(file.url, "the whole file", _reason(fault), mend=mend) from None
            else:
                return content

    def close(self) -> None:
        """Cut what is under way."""
        self._is_closed.set()
        self._connections.close()

    def _waits_out(self, file: HttpFile, fault: Exception, patience: Patience) -> bool:
        """Drop the connection that failed and wait; False where another try is of no use."""
        self._connections.drop(self._moved.get(file.url, file.url))
        if isinstance(fault, ssl.SSLCertVerificationError):
            return False
        asked = getattr(fault, "retry_after_s", None)
        if asked is not None and asked >= _LONG_WAIT_S:
            wait_s = min(asked, MAX_RETRY_AFTER_S)
            warnings.warn(f"{shown(file.url)}: {_reason(fault)}; asking again in {wait_s:.0f} s", stacklevel=2)
        return patience.wait(asked)

    def _check_whole(self, response: http.client.HTTPResponse, content: bytes) -> None:
        said = response.headers.get("Content-Length")
        if said is not None and len(content) != int(said):
            raise _TryAgainError(f"the connection closed after {len(content):,} of {counted(int(said), 'byte')}")

    def _body(self, file: HttpFile, offset: int, target: memoryview) -> Iterator[int]:
        """Ask for `target`'s bytes and fill it; yields how many came each time."""
        response = self._answer(file, {"Range": f"bytes={offset}-{offset + len(target) - 1}"})
        self._check_range(file, response, offset, len(target))
        done = 0
        while done < len(target):
            part = response.readinto(target[done : done + _SLICE_BYTES])
            if part == 0:
                raise _TryAgainError("the connection closed in the middle of the range")
            done += part
            yield part
        response.read()  # ends the body, so that the connection can be used again

    def _answer(self, file: HttpFile, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Return a response of 200 or 206."""
        url = self._moved.get(file.url, file.url)
        for _ in range(_MAX_REDIRECTS):
            own = file.headers if origin_of(url) == origin_of(file.url) else {}
            response = self._connections.get(url, {"Accept-Encoding": "identity", **own, **headers})
            if response.status in (200, 206):
                return response
            location = response.headers.get("Location")
            if response.status in _REDIRECTS and location:
                response.read()
                url = self._moved[file.url] = urljoin(url, quote(location, safe=_SAFE))
                continue
            self._connections.drop(url)
            self._refuse(file, url, response)
        raise unread(file.url, "any range", f"redirected more than {counted(_MAX_REDIRECTS, 'time')}")

    def _refuse(self, file: HttpFile, url: str, response: http.client.HTTPResponse) -> None:
        """Raise what an answer means."""
        status = response.status
        said = f"the server answers {status} {response.reason}".rstrip()
        if status in _PASSING:
            raise _TryAgainError(said, retry_after_s(response.headers.get("Retry-After", "")))
        if url != file.url:  # a signed address that has expired, most likely
            self._moved.pop(file.url, None)
            raise _TryAgainError(f"{said} at {shown(url)}")
        if status in (401, 403, 404, 410):
            cls = RemoteRefusedError if status in (401, 403) else RemoteMissingError
            why, mend = _told(response.headers)
            raise cls(f"{shown(file.url)}: {said}", why=why, mend=mend)
        if status == 416:
            raise _wrong_size(file, response.headers.get("Content-Range", "").rpartition("/")[2])
        raise unread(file.url, "a range", said)

    def _check_range(self, file: HttpFile, response: http.client.HTTPResponse, offset: int, length: int) -> None:
        if response.status == 200:
            if offset == 0 and response.headers.get("Content-Length") == str(length):
                return
            self._connections.drop(self._moved.get(file.url, file.url))
            raise unread(
                file.url,
                f"bytes {offset} to {offset + length}",
                "the server gives whole files and no ranges",
                mend="Copy the dataset to a local folder, or to a server that knows Range requests",
            )
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if match is None:
            raise unread(file.url, "a range", "206 without a Content-Range")
        if match[3] != "*" and file.size_bytes is not None and int(match[3]) != file.size_bytes:
            self._connections.drop(self._moved.get(file.url, file.url))
            raise _wrong_size(file, match[3])
        if (int(match[1]), int(match[2])) != (offset, offset + length - 1):
            raise _TryAgainError(f"asked for bytes {offset} to {offset + length}, got {match[0]}")


def unread(url: str, place: str, what: str, *, mend: str = "") -> RemoteReadError:
    """Return the error of a range, which `place` names.

    The class itself is made of one text: a DataLoader makes the error of a worker anew from that, or a RuntimeError.
    """
    return RemoteReadError(f"{shown(url)}, {place}: {what}", mend=mend)


def _told(headers: http.client.HTTPMessage) -> tuple[str, str]:
    """Return why a file is refused and what to do, by what the Hub says in headers; other servers say nothing."""
    if headers.get("X-Error-Code") == "GatedRepo":
        return "It is gated and this account has no access", "Ask for access on its page, then set HF_TOKEN"
    if "credentials" in (headers.get("X-Error-Message") or ""):
        return "The token is wrong or has expired", "Set HF_TOKEN to a new one, or run: hf auth login"
    return (
        "There is no such file, or it is not for this account",
        "Check the name; for a private dataset on the Hub set HF_TOKEN or run: hf auth login",
    )


def _wrong_size(file: HttpFile, served: str) -> DatasetMismatchError:
    found = counted(int(served), "byte") if served.isdecimal() else "fewer bytes"
    said = "more" if file.size_bytes is None else f"{file.size_bytes:,}"
    return DatasetMismatchError(
        f"{shown(file.url)} has {found}, the manifest says {said}",
        why="It was cut on its way there, or is of another packing",
        mend="Push the dataset again",
    )


def _reason(fault: Exception) -> str:
    text = str(fault)
    if isinstance(fault, _TryAgainError):
        return text
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__
