"""From a server that was just started to one that generates and has shown what it is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx

from ..schemas.counts import counted
from ..schemas.errors import EngineError, StorageError
from ..schemas.progress import Progress
from ..schemas.run import EngineFacts
from ..schemas.sizes import format_size
from ..schemas.states import bytes_per_token
from .redaction import redact_command
from .server_checks import Evidence, Expected, check_server, num_replicas, read_status
from .server_command import ServerCommand
from .server_http import RequestRefusedError, ServerAnswerError, generate_body, headers, read_generated, read_info

if TYPE_CHECKING:
    from .server import Server

FIRST_TOKEN_IDS = (1,)
"""The prompt of the trial request; any model has token 1."""

NOTE_EVERY_S = 15.0
PROBE_TIMEOUT_S = 30.0
"""A first request may compile kernels for this long and longer; it is then sent again, while that goes on."""

_LAST_PROBE_S = 1.0
"""The server is asked once more after its time is over: we may have stood still ourselves, and it be ready by then."""

_PAUSE_S = 0.25
_CONNECT_TIMEOUT_S = 5.0
_INFO_TIMEOUT_S = 60.0
_DEFAULT_CHUNK = 8192


class ServerStartTimeoutError(EngineError):
    """The server did not generate a token in time."""

    def __init__(self, url: str, timeout_s: float, last: str, last_words: str) -> None:
        """`last` is the last thing that was heard of it, `last_words` the last line of its log."""
        self.url = url
        log = f". Its log ends with: {last_words}" if last_words else ""
        super().__init__(
            f"the server at {url} did not generate a token within {timeout_s:.0f} s",
            why=f"Last answer: {last or 'none'}{log}",
            mend="See its log; if it is only slow, allow more time with --start-timeout",
        )


def wait_for_first_token(server: Server, timeout_s: float, progress: Progress) -> None:
    """Return when the server has generated one token; a port that listens or a /health that answers is not enough.

    Raises:
        ServerDiedError: its process has ended.
        ServerStartTimeoutError: nothing was generated in time.
        ServerAnswerError: something else than SGLang answers.
    """
    started = noted = time.monotonic()
    number = 0
    with open_client(server) as client:
        while True:
            server.check_alive()
            number += 1
            remaining = timeout_s - (time.monotonic() - started)
            probe_s = max(_LAST_PROBE_S, min(PROBE_TIMEOUT_S, remaining))
            last = _probe(client, f"eaglehs-start-{number}", probe_s)
            if not last:
                return
            if remaining <= 0:
                raise ServerStartTimeoutError(server.url, timeout_s, last, server.last_words())
            if time.monotonic() - noted >= NOTE_EVERY_S:
                noted = time.monotonic()
                progress.note(_waiting_text(noted - started, server.last_words()))
            time.sleep(min(_PAUSE_S, max(0.0, remaining)))


def inspect_server(server: Server, expected: Expected) -> Evidence:
    """Return what the server says of itself, if it can capture what the run needs.

    Raises:
        ServerRefusedError: a check failed.
        StorageError: the dump folder has no room for what the server has under way at once, and no client sees to it.
    """
    try:
        with open_client(server) as client:
            info = read_info(client)
    except httpx.HTTPError as fault:
        server.check_alive()
        raise EngineError(f"{server.url} did not tell its settings: {describe(fault)}") from None
    status, status_fault = read_status(expected.dump_dir)
    evidence = Evidence(info=info, status=status, status_fault=status_fault)
    check_server(evidence, expected)
    if not expected.is_bounded:
        _check_room(evidence, expected)
    return evidence


def open_client(server: Server) -> httpx.Client:
    """Return a blocking client for `server`. Proxy variables are not for a server on this machine or beside it."""
    timeout = httpx.Timeout(_INFO_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=server.url, headers=headers(server.api_key), timeout=timeout, trust_env=False)


def facts_of(evidence: Evidence, command: ServerCommand | None) -> EngineFacts:
    """Return what run.json keeps of the server; `command` is None for a server that we did not start."""
    versions = {"sglang": str(evidence.info.get("version", "unknown"))}
    if evidence.status is not None:
        versions["eaglehs_plugin"] = evidence.status.plugin_version
    return EngineFacts(
        name="sglang",
        versions=versions,
        command=_told_command(evidence.info) if command is None else command.shown_argv,
        environment={} if command is None else command.shown_environment,
        device=str(evidence.info.get("device") or "cuda"),
    )


def describe(fault: httpx.HTTPError) -> str:
    """Return a transport fault in words; several of httpx have no message of their own."""
    return f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__


def _probe(client: httpx.Client, rid: str, timeout_s: float) -> str:
    """Ask for one token; return why none came, or an empty text."""
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
    try:
        response = client.post("/generate", json=generate_body(FIRST_TOKEN_IDS, rid), timeout=timeout)
        read_generated(response, rid)
    except httpx.HTTPError as fault:
        return describe(fault)
    except RequestRefusedError as fault:
        if 400 <= fault.status < 500 and fault.status != 429:
            raise ServerAnswerError(
                f"the server refused the trial request (HTTP {fault.status}): {fault.text}"
            ) from None
        return f"HTTP {fault.status}: {fault.text}"
    return ""


def _waiting_text(seconds: float, last_words: str) -> str:
    minutes, rest = divmod(int(seconds), 60)
    log = f"; its log: {last_words[:160]}" if last_words else ""
    return f"waiting for the server's first token, {minutes} min {rest:02d} s{log}"


def _told_command(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command line that a newer server reports of itself."""
    told = info.get("launch_command")
    if isinstance(told, str):
        told = told.split()
    return redact_command([str(part) for part in told]) if isinstance(told, list) else ()


def _check_room(evidence: Evidence, expected: Expected) -> None:
    status = evidence.status
    assert status is not None, "checked before"
    chunk = evidence.info.get("chunked_prefill_size")
    num_tokens = 2 * num_replicas(evidence.info) * (chunk if isinstance(chunk, int) and chunk > 0 else _DEFAULT_CHUNK)
    needed = num_tokens * bytes_per_token(status.layers, status.hidden_size)
    free = shutil.disk_usage(expected.dump_dir).free
    if free < needed:
        raise StorageError(
            f"the dump folder {expected.dump_dir} has {format_size(free)} free, "
            f"but two prefill batches ({counted(num_tokens, 'token')}) need {format_size(needed)}",
            mend="Free space there, give another --dump-dir, or a smaller --chunked-prefill-size after --",
        )
