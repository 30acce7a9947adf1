"""The spool never holds more than its bound, nothing is dropped for it, and nobody starves."""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from eaglehs.builder.assemble import check_dumps
from eaglehs.extraction.client import Client, ClientSettings
from eaglehs.extraction.run_store import RunStore, open_store
from eaglehs.extraction.spool import DUMP_OVERHEAD_BYTES, Spool, default_spool_bytes, dump_bytes
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder
from eaglehs.schemas.states import bytes_per_token

from tests.factories.extractions import LAYOUT, record_of
from tests.factories.prompts import make_prompt, make_prompts
from tests.fakes.engine import FakeEngine, dump_prompt

PER_TOKEN = bytes_per_token(LAYOUT.layers, LAYOUT.hidden_size)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # kept meanwhile
        return 0


class WatchedEngine(FakeEngine):
    """Measures its spool after each dump."""

    most_bytes = 0

    async def capture(self, prompt, rid):
        answer = await super().capture(prompt, rid)
        await asyncio.sleep(0.002)
        self.most_bytes = max(self.most_bytes, sum(map(size_of, self.spool.iterdir())))
        return answer


class SlowStore(RunStore):
    """Keeps a sample slower than the engine makes one: after a while, or when the spool has `waits_for_bytes`."""

    waits_for_bytes = 0

    def finish(self, *arguments):
        time.sleep(0.01)
        end = time.monotonic() + 60
        while self.engine.most_bytes < self.waits_for_bytes and time.monotonic() < end:
            time.sleep(0.01)
        return super().finish(*arguments)


@pytest.mark.parametrize("bound", [30_000, 60_000, None])
def test_a_slow_keeper_never_fills_the_spool_past_its_bound_and_nothing_is_lost(bound, tmp_path):
    prompts = make_prompts(40)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    record = open_store(folder, record_of(prompts), prompts).record
    store = SlowStore(folder, record)
    store.engine = engine = WatchedEngine(tmp_path / "spool", concurrency=16)
    store.waits_for_bytes = 0 if bound else 60_001
    store.begin(engine.facts)
    settings = ClientSettings(spool_bytes=bound, bytes_per_token=PER_TOKEN)
    client = Client(engine, store, lambda prompt, answer: check_dumps(prompt, answer.dumps, LAYOUT), settings)
    outcome = asyncio.run(client.run(prompts, Silent()))
    assert outcome.num_done == len(list(store.ledger.finished())) == 40
    assert engine.most_bytes <= (bound or 10**9)
    assert bound or engine.most_bytes > 60_000  # without a bound it would have been passed
    assert list(engine.spool.iterdir()) == []


def test_a_dump_is_never_larger_than_it_is_reckoned(tmp_path):
    for num_tokens in (1, 7, 100, 1000):
        prompt = make_prompt("a", num_tokens)
        dump = dump_prompt(tmp_path, prompt, "eh-0123abcd-a-100", LAYOUT.layers, LAYOUT.hidden_size)
        rows = num_tokens * PER_TOKEN
        assert rows - num_tokens <= dump.stat().st_size <= dump_bytes(num_tokens, PER_TOKEN) <= rows + 2 * 8192


def test_the_overhead_covers_dumps_of_many_layers(tmp_path):
    prompt = make_prompt("a", 5)
    layers = tuple(range(5))
    dump = dump_prompt(tmp_path, prompt, "eh-0123abcd-a-100", layers, 64)
    assert dump.stat().st_size <= 5 * bytes_per_token(layers, 64) + DUMP_OVERHEAD_BYTES
    assert torch.load(dump, weights_only=True)["rid"] == "eh-0123abcd-a-100"


def test_a_prompt_larger_than_the_bound_goes_alone_and_none_overtakes_it():
    order = []

    async def take(spool, num_tokens):
        async with spool.room(num_tokens):
            order.append(num_tokens)
            assert num_tokens != 1000 or spool.used_bytes == dump_bytes(1000, 100)
            await asyncio.sleep(0.001)

    async def all_of_them():
        spool = Spool(50_000, 100)
        await asyncio.gather(*(take(spool, n) for n in (10, 20, 1000, 30, 40)))
        assert spool.used_bytes == 0

    asyncio.run(all_of_them())
    assert order == [10, 20, 1000, 30, 40]


def test_a_cancelled_prompt_gives_its_room_back():
    async def cancel():
        spool = Spool(20_000, 100)
        holding = asyncio.create_task(hold(spool))
        waiting = asyncio.create_task(hold(spool))
        await asyncio.sleep(0.001)
        for task in (waiting, holding):
            task.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        async with asyncio.timeout(1), spool.room(100):
            return spool.used_bytes

    async def hold(spool):
        async with spool.room(100):
            await asyncio.sleep(60)

    assert asyncio.run(cancel()) == dump_bytes(100, 100)


@pytest.mark.parametrize(
    ("sizes", "concurrency", "free", "bound"),
    [([10, 30, 20], 1, 1000, 50), ([10, 30, 20], 16, 1000, 60), ([10, 30, 20], 16, 80, 40), ([], 4, 100, 0)],
)
def test_the_default_bound_is_half_of_what_is_free_or_what_is_in_hand_at_once(sizes, concurrency, free, bound):
    assert default_spool_bytes(sizes, concurrency, free) == bound
