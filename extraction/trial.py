"""A trial request through server, plugin and dump folder, before the first prompt: does a dump come out?

One to each replica of a data-parallel server: each has a process of its own that dumps, or does not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx

from ..schemas.counts import counted
from ..schemas.dump import DumpNameError, RequestId
from ..schemas.errors import DataError, EngineError
from .dump_folder import clean
from .rows import RowsOf, dumps_in
from .server_checks import Expected, ServerRefusedError, num_nodes, num_replicas, read_status
from .server_http import generate_body, read_generated
from .server_ready import describe, open_client

if TYPE_CHECKING:
    from .server import Server

TRIAL_IDS = (1, 2)
TRIAL_TIMEOUT_S = 30.0
"""From the answer to the dump of two rows."""

_ATTEMPT = 999_999
_POLL_S = 0.02
_GIVE_FOLDER = "Give the server's own SGLANG_HS_DUMP_DIR with --dump-dir, or start it with `eaglehs serve`"


def try_capture(server: Server, expected: Expected, info: Mapping[str, Any]) -> None:
    """Send a prompt of two tokens to each replica and see its dump come; the dumps are removed.

    It proves at once what would else show after the first prompts: the plugin is loaded in the processes that compute,
    dumps into this folder, and nothing came from a cache. `info` is what the server says of its settings.

    Raises:
        ServerRefusedError: no dump came, or it is short.
        EngineError: the request itself failed.
    """
    for replica in range(num_replicas(info)):
        _try_replica(server, expected, info, replica)


def _try_replica(server: Server, expected: Expected, info: Mapping[str, Any], replica: int) -> None:
    rid = trial_rid(expected.rid_prefix, replica)
    body = generate_body(TRIAL_IDS, rid)
    if num_replicas(info) > 1:
        body["routed_dp_rank"] = replica
    try:
        with open_client(server) as client:
            response = client.post("/generate", json=body)
        generated = read_generated(response, rid)
        _wait_for_rows(server, expected, info, rid)
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
            "trial",
            f"the server took {generated.cached_tokens:,} of {counted(len(TRIAL_IDS), 'token')} from a prefix cache",
        )


def trial_rid(rid_prefix: str, replica: int = 0) -> str:
    """Return the request id of a replica's trial: of this run, or of the run `serve` where any run is captured."""
    attempt = _ATTEMPT - replica
    text = f"{rid_prefix}trial-{attempt}"
    try:
        return str(RequestId.parse(text))
    except DumpNameError:
        return str(RequestId(run="serve", key="trial", attempt=attempt))


def _wait_for_rows(server: Server, expected: Expected, info: Mapping[str, Any], rid: str) -> None:
    deadline = time.monotonic() + TRIAL_TIMEOUT_S
    while True:
        is_late = time.monotonic() > deadline  # before the look: we may stand still ourselves, and the dump be there
        rows = RowsOf(rid=rid, num_tokens=len(TRIAL_IDS))
        for name in dumps_in(expected.dump_dir, f"{rid}."):
            rows.add(name)
        if rows.is_whole:
            return
        server.check_alive()
        if is_late:
            raise _refusal(expected, info)
        time.sleep(_POLL_S)


def _refusal(expected: Expected, info: Mapping[str, Any]) -> ServerRefusedError:
    status, fault = read_status(expected.dump_dir)
    said = fault or (status.message if status else "it is gone")
    what = f"the server answered the trial request, but no dump came to {expected.dump_dir} in {TRIAL_TIMEOUT_S:.0f} s"
    if said:
        return ServerRefusedError("trial", what, why=f"The plugin says: {said}", mend=_GIVE_FOLDER)
    if num_nodes(info) > 1:
        return ServerRefusedError(
            "trial",
            what,
            why=f"The server runs on {counted(num_nodes(info), 'node')}, and its rank 0 writes the dumps, "
            "on its own node",
            mend=f"Run eaglehs on the node of rank 0 (--node-rank 0), or put --dump-dir on a disk that both see. "
            f"{_GIVE_FOLDER}",
        )
    return ServerRefusedError(
        "trial", what, why="The plugin says that it is ready, so it may dump into another folder", mend=_GIVE_FOLDER
    )
