"""The HTTP calls to SGLang that eaglehs makes, and how their answers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from ..schemas.errors import DataError, EngineError
from ..schemas.sample import NO_NEXT_TOKEN

_TEXT_CHARS = 500


class ServerAnswerError(EngineError):
    """Something answers at the server's address, but not as SGLang does."""


class RequestRefusedError(DataError):
    """The server refused or aborted one request; others may go on."""

    def __init__(self, rid: str, status: int, text: str) -> None:
        """`text` is the server's own message."""
        self.rid = rid
        self.status = status
        self.text = text
        super().__init__(f"{rid}: the server answered HTTP {status}: {text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """SGLang's answer to one request of one new token."""

    next_token: int
    prompt_tokens: int
    cached_tokens: int


def generate_body(input_ids: Sequence[int], rid: str) -> dict[str, Any]:
    """Return the JSON body of `/generate`: ids in, one greedy token out."""
    return {
        "input_ids": [int(token) for token in input_ids],
        "rid": rid,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }


def read_generated(response: httpx.Response, rid: str) -> Generated:
    """Return what `/generate` answered.

    Raises:
        RequestRefusedError: this request was refused or aborted.
        ServerAnswerError: the key is wrong, there is no such route, or the answer is none of SGLang's.
    """
    if response.status_code in (401, 403):
        raise ServerAnswerError(
            f"{response.url} answered HTTP {response.status_code}: {_message(response)}",
            why="The server wants an API key",
            mend="Set SGLANG_API_KEY to it, or give --api-key after --",
        )
    if response.status_code == 404:
        raise ServerAnswerError(f"{response.url} does not exist", mend="Give the address of an SGLang server")
    if response.status_code != 200:
        raise RequestRefusedError(rid, response.status_code, _message(response))
    answer = _json(response)
    try:
        meta = answer["meta_info"]
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":
            raise RequestRefusedError(rid, 200, f"aborted: {str(finish.get('message'))[:_TEXT_CHARS]}")
        output = answer.get("output_ids") or [NO_NEXT_TOKEN]
        return Generated(
            next_token=int(output[0]),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ServerAnswerError(
            f"{response.url} gave an answer that SGLang does not give: {response.text[:200]}"
        ) from None


def read_info(client: httpx.Client) -> Mapping[str, Any]:
    """Return what the server says of its own settings, from `/server_info` or, of older ones, `/get_server_info`.

    Raises:
        ServerAnswerError: neither exists, or it is no JSON object.
        httpx.HTTPError: the connection failed.
    """
    for path in ("/server_info", "/get_server_info"):
        response = client.get(path)
        if response.status_code == 200:
            return _json(response)
    raise ServerAnswerError(
        f"{client.base_url} has no /server_info (HTTP {response.status_code})",
        why="It is no SGLang server, a very old one, or wants an API key",
        mend="Start one with `eaglehs serve`",
    )


def headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that a server with this key wants."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _json(response: httpx.Response) -> Mapping[str, Any]:
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerAnswerError(f"{response.url} gave no JSON object: {response.text[:200]!r}")
    return value


def _message(response: httpx.Response) -> str:
    """Return the server's own text: `{"error": {"message": ...}}`, or whatever else it wrote."""
    try:
        value = response.json()
    except ValueError:
        return response.text[:_TEXT_CHARS]
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_TEXT_CHARS]
