"""One trial request through server, plugin and dump folder, before the first prompt: does a dump come out?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx

from ..schemas.dump import DumpNameError, RequestId
from ..schemas.errors import DataError, EngineError
from .dump_folder import clean
from .rows import RowsOf, dumps_in
from .server_checks import Expected, ServerRefusedError, read_status
from .server_http import generate_body, read_generated
from .server_ready import describe, open_client

if TYPE_CHECKING:
    from .server import Server

TRIAL_IDS = (1, 2)
TRIAL_TIMEOUT_S = 30.0
"""From the answer to the dump of two rows."""

_ATTEMPT = 999_999
_POLL_S = 0.02


def try_capture(server: Server, expected: Expected) -> None:
    """Send a prompt of two tokens and see its dump come; the dump is removed.

    It proves at once what would else show after the first prompts: the plugin is loaded in the process that computes,
    dumps into this folder, and nothing came from a cache.

    Raises:
        ServerRefusedError: no dump came, or it is short.
        EngineError: the request itself failed.
    """
    rid = trial_rid(expected.rid_prefix)
    try:
        with open_client(server) as client:
            response = client.post("/generate", json=generate_body(TRIAL_IDS, rid))
        generated = read_generated(response, rid)
        _wait_for_rows(server, expected, rid)
    except httpx.HTTPError as fault:
        server.check_alive()
        raise EngineError(f"the trial request to {server.url} failed: {describe(fault)}") from None
    except ServerRefusedError:
        raise
    except DataError as fault:
        raise EngineError(f"the trial request failed: {fault}") from None
    finally:
        clean(expected.dump_dir, rid_prefix=rid)
    if generated.cached_tokens:
        raise ServerRefusedError(
            "trial", f"the server took {generated.cached_tokens} of {len(TRIAL_IDS)} tokens from a prefix cache"
        )


def trial_rid(rid_prefix: str) -> str:
    """Return the request id of the trial: of this run, or of the run `serve` where any run is captured."""
    text = f"{rid_prefix}trial-{_ATTEMPT}"
    try:
        return str(RequestId.parse(text))
    except DumpNameError:
        return str(RequestId(run="serve", key="trial", attempt=_ATTEMPT))


def _wait_for_rows(server: Server, expected: Expected, rid: str) -> None:
    deadline = time.monotonic() + TRIAL_TIMEOUT_S
    while True:
        rows = RowsOf(rid=rid, num_tokens=len(TRIAL_IDS))
        for name in dumps_in(expected.dump_dir, f"{rid}."):
            rows.add(name)
        if rows.is_whole:
            return
        server.check_alive()
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    status, fault = read_status(expected.dump_dir)
    said = fault or (status.message if status else "it is gone")
    raise ServerRefusedError(
        "trial",
        f"the server answered the trial request, but no dump came to {expected.dump_dir} in {TRIAL_TIMEOUT_S:.0f} s",
        why=f"The plugin says: {said}"
        if said
        else "The plugin says that it is ready, so it may dump into another folder",
        mend="Give the server's own SGLANG_HS_DUMP_DIR with --dump-dir, or start it with `eaglehs serve`",
    )
