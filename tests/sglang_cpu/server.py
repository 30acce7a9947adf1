"""One real SGLang server for tests: own process group, own log, a free port, gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from eaglehs.extraction.server_environment import choose_port

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 180.0
"""The first request to a DeepSeek shape compiles for about 20 s."""


class SglangServer:
    """A running server, spoken to over HTTP."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        """`process` leads a process group of its own."""
        self.process = process
        self.log = log
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_TIMEOUT_S)

    def generate(self, input_ids: Sequence[int], *, rid: str, max_new_tokens: int = 1) -> dict[str, Any]:
        """Run one prompt at temperature 0 and return the answer: `output_ids`, `meta_info`."""
        return self.generate_with(_request(input_ids, rid, max_new_tokens)).json()

    def generate_with(self, request: Mapping[str, Any]) -> httpx.Response:
        """Send a request as it is."""
        return self.http.post("/generate", json=request).raise_for_status()

    def generate_all(self, prompts: Mapping[str, Sequence[int]], *, max_new_tokens: int = 1) -> dict[str, Any]:
        """Run all prompts at once (request id -> ids); return the answers by request id."""
        requests = {rid: _request(ids, rid, max_new_tokens) for rid, ids in prompts.items()}
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            answers = pool.map(lambda request: self.generate_with(request).json(), requests.values())
            return dict(zip(requests, answers, strict=True))

    def wait_until_ready(self) -> None:
        """Wait until the server answers, or fail with the end of its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"SGLang ended with {self.process.returncode}:\n{self.last_log_lines()}")
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health", timeout=5).status_code == httpx.codes.OK:
                    return
            time.sleep(0.5)
        raise AssertionError(f"SGLang did not start in {START_TIMEOUT_S} s:\n{self.last_log_lines()}")

    def last_log_lines(self) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """End the whole process group: gently, then for good."""
        self.http.close()
        for ending, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        self.process.wait(1)


@contextlib.contextmanager
def running_server(
    python: Path, model: Path, *, flags: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[SglangServer]:
    """Start a server of `model`, yield it when it answers, and stop it."""
    port = choose_port("127.0.0.1", None)
    command = [python, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=log.parent,  # `python -m` puts the working folder first: a checkout's eaglehs/ has no extraction/ in it
            start_new_session=True,
        )
    server = SglangServer(process, port, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def _request(input_ids: Sequence[int], rid: str, max_new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": list(input_ids), "rid": rid, "sampling_params": sampling}
