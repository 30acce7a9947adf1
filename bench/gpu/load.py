"""A client that only loads a server: prompts of random ids, many at a time, and a consumer that frees the dumps."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

VOCAB = 32768


def random_ids(num_tokens: int, seed: int, vocab: int = VOCAB) -> list[int]:
    """Return ids that no other seed gives, away from both ends of the vocabulary."""
    draw = random.Random(seed * 1_000_003 + num_tokens)
    return [draw.randrange(5, vocab - 10) for _ in range(num_tokens)]


@dataclass(slots=True)
class Consumer:
    """Takes finished dumps out of a folder, as `eaglehs extract` would, and counts them."""

    folder: Path
    take: Callable[[Path], object] = Path.unlink
    """Called with each dump; must remove it."""

    num_threads: int = 1
    num_files: int = 0
    size_bytes: int = 0
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Consumer:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        assert self._thread is not None
        self._thread.join()
        self._sweep()

    def wait_for(self, num_bytes: int, timeout_s: float = 60.0) -> bool:
        """Wait until as many bytes were taken; tell whether they were."""
        deadline = time.monotonic() + timeout_s
        while self.size_bytes < num_bytes and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.size_bytes >= num_bytes

    def _run(self) -> None:
        while not self._ends.wait(0.02):
            self._sweep()

    def _sweep(self) -> None:
        found = [(path, path.stat().st_size) for path in self.folder.glob("eh-*.pt")]
        with ThreadPoolExecutor(self.num_threads) as pool:
            list(pool.map(self.take, [path for path, _ in found]))
        self.size_bytes += sum(size for _, size in found)
        self.num_files += len(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How one pass of load went."""

    tokens_per_s: float
    seconds: float
    answers: dict[str, dict[str, object]]
    """Request id -> the server's answer."""


def send_all(url: str, prompts: dict[str, Sequence[int]], concurrency: int) -> Rate:
    """Send all prompts (request id -> ids), one new token each, and time from the first to the last answer."""
    return asyncio.run(_send_all(url, prompts, concurrency))


async def _send_all(url: str, prompts: dict[str, Sequence[int]], concurrency: int) -> Rate:
    answers: dict[str, dict[str, object]] = {}
    queue = iter(list(prompts.items()))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:

        async def work() -> None:
            for rid, ids in queue:
                sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
                body = {"input_ids": list(ids), "rid": rid, "sampling_params": sampling}
                answers[rid] = (await http.post("/generate", json=body)).raise_for_status().json()

        started = time.perf_counter()
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())
        seconds = time.perf_counter() - started
    num_tokens = sum(map(len, prompts.values()))
    return Rate(tokens_per_s=num_tokens / seconds, seconds=seconds, answers=answers)


def wait_until_serving(url: str, is_alive: Callable[[], bool], timeout_s: float) -> None:
    """Wait until the server generates a token."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not is_alive():
            raise SystemExit("the server has ended")
        with contextlib.suppress(httpx.HTTPError):
            body = {"input_ids": list(range(5, 21)), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            if httpx.post(f"{url}/generate", json=body, timeout=120, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise SystemExit(f"the server did not answer in {timeout_s} s")
