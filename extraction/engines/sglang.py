"""The engine for real runs: prompts to a patched SGLang server over HTTP, states back as dumps in a folder."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ...schemas.counts import counted
from ...schemas.errors import DataError, EngineError
from ...schemas.prompt import Prompt
from ...schemas.run import EngineFacts
from ..capture_status import READY
from ..dump_watcher import DumpWatcher
from ..rows import RowsOf
from ..server import Server
from ..server_checks import read_status
from ..server_http import Generated, RequestRefusedError, generate_body, headers, read_generated
from ..server_ready import describe
from .protocol import Answer, EngineDownError, PassingError

DEFAULT_CONCURRENCY = 16
"""Enough prompts of some thousand tokens to fill SGLang's prefill batches; more would only wait in its queue."""

BUSY_STATUSES = frozenset({429, 502, 503, 504})
"""The server, or a proxy before it, can't take the request now."""

_LOOK_EVERY_S = 0.5
_ALIVE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_DEATH_NOTICE_S = 5.0
"""A server that has dropped a connection is often about to end: wait for that, its log says more than the socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the engine waits for what."""

    dump_s: float = 120.0
    """From a request's answer to its last dump. The plugin holds a few batches at most, so this is a very slow disk."""

    request_s: float = 3600.0
    """From sending to the answer; long, since requests wait in the server's queue and a first one compiles kernels."""

    stall_s: float = 600.0
    """Without an answer or a dump of any request for so long, the server hangs. One prompt of 100,000 tokens dumps a
    chunk every few seconds; a first batch that compiles kernels takes minutes."""


class MissingRowsError(DataError):
    """Dumps of a request stayed away or came short."""

    def __init__(self, rows: RowsOf, missing: list[tuple[int, int]], cached_tokens: int, said: str) -> None:
        """`missing` are gaps (first row, row after the last); `said` is what the plugin says of itself."""
        self.rid = rows.rid
        self.missing = tuple(missing)
        self.cached_tokens = cached_tokens
        gaps = ", ".join(f"{start}..{end - 1}" for start, end in missing)
        cached = f"The server took {counted(cached_tokens, 'token')} from its prefix cache and never computed them"
        super().__init__(
            f"{rows.rid}: rows {gaps} of {rows.num_tokens} are missing (cached_tokens {cached_tokens})",
            why=cached if cached_tokens else said,
            mend="Restart the server with --disable-radix-cache" if cached_tokens else "See the server's log",
        )


class RowFaultError(PassingError):
    """Dumps of a request hold rows twice, or rows that the prompt does not have.

    A server short of memory for its cache retracts a request and prefills it again; with fewer beside it, it fits.
    """

    def __init__(self, rows: RowsOf) -> None:
        """Name the rows."""
        self.rid = rows.rid
        super().__init__(f"{rows.rid}: {rows.fault}", why="The server computed parts of the request more than once")


class PromptTokensError(DataError):
    """The server ran another number of tokens than were sent."""

    def __init__(self, rid: str, sent: int, ran: int) -> None:
        """Both counts."""
        self.rid = rid
        super().__init__(
            f"{rid}: {counted(sent, 'token id was', 'token ids were')} sent, the server ran {ran:,}",
            why="Ids must go in and be run as they are",
            mend="Start the server with --skip-tokenizer-init and without --allow-auto-truncate",
        )


class BusyServerError(PassingError):
    """The server can't take requests now."""

    concerns_all = True

    def __init__(self, refusal: RequestRefusedError) -> None:
        """Keep the server's own words."""
        self.status = refusal.status
        super().__init__(str(refusal), why="The server is overloaded, starting or ending")


class LostRequestError(PassingError):
    """The connection of one request broke, but the server answers."""

    concerns_all = True

    def __init__(self, rid: str, fault: str) -> None:
        """`fault` is the transport's."""
        super().__init__(f"{rid}: the connection broke before the answer came ({fault}); the server itself answers")


class ServerHangsError(EngineDownError):
    """Nothing has come from the server for too long, though requests are under way."""

    def __init__(self, url: str, stall_timeout_s: float, num_under_way: int, last_words: str) -> None:
        """`last_words` is the last line of the server's log."""
        self.url = url
        log = f" Its log ends with: {last_words}" if last_words else ""
        super().__init__(
            f"{url} has sent no answer and no dump for {stall_timeout_s:g} s, with "
            f"{counted(num_under_way, 'request')} under way",
            why=f"The server hangs.{log}",
            mend="See its log; if a single prompt may take that long, allow more with --stall-timeout",
        )


class ConnectionLostError(EngineDownError):
    """The server does not answer any more."""

    def __init__(self, url: str, fault: str, last_words: str) -> None:
        """`fault` is the transport's, `last_words` the last line of the server's log."""
        self.url = url
        log = f". Its log ends with: {last_words}" if last_words else ""
        super().__init__(f"the connection to {url} was lost ({fault})", why=f"The server has stopped or hangs{log}")


class CaptureFailedError(EngineError):
    """The plugin has stopped capturing; the server goes on without it."""

    def __init__(self, message: str) -> None:
        """`message` is the plugin's."""
        super().__init__(f"capture has failed in the server: {message}", mend="Mend the cause and start it again")


class SglangEngine:
    """Sends prompts to one server (see extraction/server.py) that has passed its checks. For one event loop."""

    def __init__(
        self,
        server: Server,
        rid_prefix: str,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        patience: Patience | None = None,
    ) -> None:
        """`rid_prefix` is the run's; other runs' dumps in the folder are left alone."""
        self.server = server
        self.concurrency = concurrency
        self.patience = patience or Patience()
        self._answered_at = 0.0
        self._num_under_way = 0
        self._watcher = DumpWatcher(server.dump_dir, rid_prefix)
        self._client: httpx.AsyncClient | None = None

    @property
    def facts(self) -> EngineFacts:
        """What to write into run.json."""
        return self.server.facts

    async def capture(self, prompt: Prompt, rid: str) -> Answer:
        """Run one prompt and return when its dumps are whole in the spool.

        A failed or cancelled capture leaves no dump behind.

        Raises:
            BusyServerError, LostRequestError, RowFaultError: this prompt is to be asked again.
            MissingRowsError, PromptTokensError, RequestRefusedError: this prompt failed.
            ServerDiedError, ServerHangsError, ConnectionLostError, CaptureFailedError: the server failed.
            StorageError: the spool can't be read.
        """
        rows = self._watcher.expect(rid, prompt.num_tokens)
        try:
            generated = await self._generate(prompt, rid)
            await self._wait_for_rows(rows, generated)
        except BaseException:
            self._watcher.discard(rid)
            raise
        self._watcher.release(rid)
        return Answer(
            dumps=tuple(self._path(name.filename) for name in rows.names),
            next_token=generated.next_token,
            cached_tokens=generated.cached_tokens,
        )

    async def _generate(self, prompt: Prompt, rid: str) -> Generated:
        try:
            generated = read_generated(await self._post(generate_body(prompt.input_ids, rid)), rid)
        except httpx.HTTPError as fault:
            await self._notice_death()
            if await self._is_answering():
                raise LostRequestError(rid, describe(fault)) from None
            raise ConnectionLostError(self.server.url, describe(fault), self.server.last_words()) from None
        except RequestRefusedError as fault:
            if fault.status in BUSY_STATUSES:
                self.server.check_alive()
                raise BusyServerError(fault) from None
            if fault.status >= 500:
                await self._notice_death()
            raise
        if generated.prompt_tokens != prompt.num_tokens:
            raise PromptTokensError(rid, prompt.num_tokens, generated.prompt_tokens)
        return generated

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """Send a request and wait for its answer for as long as the server lives and anything comes from it.

        Raises:
            ServerDiedError: its process has ended: a socket may stay open longer than that.
            ServerHangsError: no answer and no dump of any request came for `stall_s`.
        """
        sent_at = time.monotonic()
        request = asyncio.create_task(self._http().post("/generate", json=body))
        self._num_under_way += 1
        was_late = False
        try:
            while not (await asyncio.wait({request}, timeout=_LOOK_EVERY_S))[0]:
                self.server.check_alive()
                moved_at = max(sent_at, self._answered_at, self._watcher.moved_at)
                is_late = time.monotonic() - moved_at > self.patience.stall_s
                if is_late and was_late:  # twice: we may have stood still ourselves, with the answer there (Ctrl-Z)
                    last_words = self.server.last_words()
                    raise ServerHangsError(self.server.url, self.patience.stall_s, self._num_under_way, last_words)
                was_late = is_late
        finally:
            self._num_under_way -= 1
            request.cancel()
        response = request.result()
        self._answered_at = time.monotonic()
        return response

    async def _is_answering(self) -> bool:
        """Tell whether anything answers at the server's address; this asks nothing of the model."""
        try:
            await self._http().get("/model_info", timeout=_ALIVE_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return True

    async def _wait_for_rows(self, rows: RowsOf, generated: Generated) -> None:
        if generated.cached_tokens:  # these rows never come: no need to wait for them
            raise MissingRowsError(rows, [(0, generated.cached_tokens)], generated.cached_tokens, "")
        deadline = time.monotonic() + self.patience.dump_s
        is_late = False
        while not await self._watcher.wait(rows.rid, _LOOK_EVERY_S):
            self.server.check_alive()
            said = self._plugin_says()
            if is_late:
                raise MissingRowsError(rows, rows.missing, generated.cached_tokens, said)
            is_late = time.monotonic() > deadline  # looked at once more: we may have stood still ourselves (Ctrl-Z)
        if rows.fault:
            raise RowFaultError(rows)

    def _plugin_says(self) -> str:
        """Return what the status file says about dumps that stay away.

        Raises:
            CaptureFailedError: it says that capture has failed.
        """
        status, fault = read_status(self.server.dump_dir)
        if status is None:  # the plugin removes it where the disk is too full to say what is wrong
            raise CaptureFailedError(fault or f"its status file is gone from {self.server.dump_dir}")
        if status.state != READY:
            raise CaptureFailedError(status.message)
        return "The plugin says that it is ready; its writers may be stuck, or the request was cut short"

    async def _notice_death(self) -> None:
        """Give the server a moment to end.

        Raises:
            ServerDiedError: it did.
        """
        deadline = time.monotonic() + _DEATH_NOTICE_S
        while time.monotonic() < deadline:
            self.server.check_alive()
            await asyncio.sleep(0.1)

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self.server.url,
                headers=headers(self.server.api_key),
                timeout=httpx.Timeout(self.patience.request_s, connect=_CONNECT_TIMEOUT_S),
                # A kept connection that the server closes just as a request goes out looks like a dead server.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=False,
            )
        return self._client

    def _path(self, filename: str) -> Path:
        return self.server.dump_dir / filename
