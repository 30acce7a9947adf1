"""Several servers as one engine: where work goes, and that no sample is lost or doubled when servers fail."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from eaglehs.builder.assemble import check_dumps
from eaglehs.builder.plan import DatasetLayout
from eaglehs.extraction.client import Client, ClientSettings, Outcome
from eaglehs.extraction.engines.pool import NoServerLeftError, PoolEngine, ServerKillerError, UnlikeServersError
from eaglehs.extraction.engines.protocol import Answer
from eaglehs.extraction.engines.sglang import Patience, SglangEngine
from eaglehs.extraction.run_store import RunStore, open_store
from eaglehs.extraction.server import attached_server
from eaglehs.extraction.server_checks import Expected, ServerRefusedError
from eaglehs.schemas.dump import DumpName
from eaglehs.schemas.errors import DataError, EngineError
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.prompt import Prompt
from eaglehs.schemas.run import EngineFacts, RunFolder

from tests.factories.prompts import make_prompt, make_prompts
from tests.factories.records import engine_facts, model_facts, run_record
from tests.fakes.sglang_server import HIDDEN, FakeSettings, FakeSglang, Faults

RECORD = run_record(layers=(1, 2), model=model_facts(hidden_size=HIDDEN), engine=engine_facts(name="sglang"))
PREFIX = f"eh-{RECORD.run_id}-"
LAYOUT = DatasetLayout(layers=(1, 2), hidden_size=HIDDEN)
Start = Callable[..., tuple[FakeSglang, SglangEngine]]


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eaglehs.extraction.engines.sglang._DEATH_NOTICE_S", 0.2)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a fake server with a dump folder of its own, and an engine that was checked."""
    fakes: list[FakeSglang] = []

    def begin(**faults: Any) -> tuple[FakeSglang, SglangEngine]:
        folder = tmp_path / f"dumps{len(fakes)}"
        folder.mkdir()
        fake = FakeSglang(FakeSettings(dump_dir=folder), Faults(**faults)).start()
        fakes.append(fake)
        expected = Expected(model="tiny", layers=(1, 2), rid_prefix=PREFIX, dump_dir=folder)
        with attached_server(fake.url, expected, Silent()) as server:
            return fake, SglangEngine(server, PREFIX, concurrency=4, patience=Patience(dump_s=60.0))

    yield begin
    for fake in fakes:
        fake.stop()


def run_client(pool: PoolEngine, folder: RunFolder, prompts: list[Prompt]) -> tuple[Outcome, RunStore]:
    """Run one extraction as `eaglehs extract` does."""
    folder.root.mkdir(exist_ok=True)
    store = open_store(folder, RECORD, prompts)
    store.repair()
    store.begin(pool.facts)
    client = Client(pool, store, lambda prompt, answer: check_dumps(prompt, answer.dumps, LAYOUT), ClientSettings())
    return asyncio.run(asyncio.wait_for(client.run(store.pending(prompts), Silent()), 300)), store


def keys_asked(fake: FakeSglang) -> list[str]:
    return [body["rid"].split("-")[2] for body in fake.requests if body["rid"].startswith(PREFIX + "p")]


def assert_each_once(store: RunStore, folder: RunFolder, prompts: list[Prompt]) -> None:
    """Every sample is finished once, its dumps tile its rows, and no other dump is there."""
    entries = list(store.ledger.finished())
    assert sorted(entry.key for entry in entries) == [prompt.key for prompt in prompts]
    names = sorted(path.name for path in folder.root.glob("dumps/*/*"))
    assert names == sorted(dump.name for entry in entries for dump in entry.dumps)
    for entry in entries:
        ranges = sorted((DumpName.parse(dump.name).start, DumpName.parse(dump.name).end) for dump in entry.dumps)
        assert [end for _, end in ranges][-1] == entry.num_tokens
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]


def spool_files(*fakes: FakeSglang) -> list[str]:
    return [path.name for fake in fakes for path in fake.settings.dump_dir.glob("*.pt")]


def test_two_servers_share_the_work_and_each_sample_is_kept_once(start: Start, tmp_path: Path):
    (one, first), (two, second) = start(), start()
    pool = PoolEngine([first, second], pytest.fail)
    prompts, folder = make_prompts(40), RunFolder(tmp_path / "run")
    outcome, store = run_client(pool, folder, prompts)
    assert outcome.num_done == 40
    assert pool.concurrency == 8
    asked = [keys_asked(one), keys_asked(two)]
    assert sorted(asked[0] + asked[1]) == [prompt.key for prompt in prompts]
    assert min(map(len, asked)) >= 4  # those that are sent before any answer
    assert_each_once(store, folder, prompts)
    assert spool_files(one, two) == []


def test_a_slow_server_gets_less(start: Start, tmp_path: Path):
    (one, first), (two, second) = start(), start()
    dump, are_done = one.dump, threading.Event()

    def dump_last(body: dict[str, Any], **fault: Any) -> None:
        assert are_done.wait(60), "the other server did not get what this one had no room for"
        dump(body, **fault)

    def dump_and_count(body: dict[str, Any], **fault: Any) -> None:
        FakeSglang.dump(two, body, **fault)
        if len(keys_asked(two)) == 40 - first.concurrency:
            are_done.set()

    one.dump, two.dump = dump_last, dump_and_count  # type: ignore[method-assign]
    outcome, _ = run_client(PoolEngine([first, second], pytest.fail), RunFolder(tmp_path / "run"), make_prompts(40))
    assert outcome.num_done == 40
    assert len(keys_asked(one)) == first.concurrency


class Dies:
    """Lets a server fail after some requests: from then on every connection is reset."""

    def __init__(self, fake: FakeSglang, after: int) -> None:
        self.answers = fake.dump
        self.fake = fake
        self.left = after
        fake.dump = self.dump  # type: ignore[method-assign]

    def dump(self, body: dict[str, Any], **fault: Any) -> None:
        self.left -= 1
        if self.left < 0:
            self.fake.http.server_close()  # nobody listens any more
            raise ConnectionResetError("made up")
        self.answers(body, **fault)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_server_that_dies_in_mid_run_loses_and_doubles_nothing(start: Start, tmp_path: Path, after: int):
    (one, first), (two, second) = start(), start()
    Dies(one, after)
    notes: list[str] = []
    pool = PoolEngine([first, second], notes.append)
    prompts, folder = make_prompts(40), RunFolder(tmp_path / "run")
    outcome, store = run_client(pool, folder, prompts)
    assert (outcome.num_done, outcome.failures) == (40, ())
    assert_each_once(store, folder, prompts)
    assert spool_files(one, two) == []
    (note,) = notes
    assert f"server {one.url} is given up (1 of 2)" in note
    assert "go to the other 1" in note
    assert [url for url, _ in pool.lost] == [one.url]


def test_a_server_whose_capture_has_failed_is_left_out_though_it_answers(start: Start, tmp_path: Path):
    (one, first), (_, second) = start(capture_fails=True), start()
    notes: list[str] = []
    prompts, folder = make_prompts(20), RunFolder(tmp_path / "run")
    outcome, store = run_client(PoolEngine([first, second], notes.append), folder, prompts)
    assert outcome.num_done == 20
    assert_each_once(store, folder, prompts)
    assert "No space left on device" in notes[0]
    assert len(keys_asked(one)) <= 4  # as many as were under way when it was noticed


def test_a_dump_folder_that_vanishes_costs_its_server_and_not_the_run(start: Start, tmp_path: Path):
    (_, first), (_, second) = start(), start()
    first._watcher.folder = tmp_path / "gone"
    notes: list[str] = []
    outcome, _ = run_client(PoolEngine([first, second], notes.append), RunFolder(tmp_path / "run"), make_prompts(12))
    assert outcome.num_done == 12
    assert "can't be read" in notes[0]


def test_the_run_ends_when_no_server_is_left_and_goes_on_later(start: Start, tmp_path: Path):
    (one, first), (two, second) = start(), start()
    Dies(one, 5)
    Dies(two, 9)
    prompts, folder = make_prompts(40), RunFolder(tmp_path / "run")
    with pytest.raises(NoServerLeftError, match="none of 2 servers is left") as caught:
        run_client(PoolEngine([first, second], lambda _: None), folder, prompts)
    assert isinstance(caught.value, EngineError)
    assert {url for url, _ in caught.value.faults} == {one.url, two.url}
    assert "finished samples are kept" in str(caught.value)
    (three, third) = start()
    _, store = run_client(PoolEngine([third], lambda _: None), folder, prompts)
    assert_each_once(store, folder, prompts)
    assert 20 < len(keys_asked(three)) < 40


class Scripted:
    """A server as an engine in this process, whose answer to each prompt is scripted."""

    def __init__(self, url: str, behave: Callable[[Prompt], Coroutine[Any, Any, None]], **facts: Any) -> None:
        self.url = url
        self.server = self
        self.behave = behave
        self.concurrency = 3
        self.facts: EngineFacts = engine_facts(name="sglang", **facts)
        self.under_way: Counter[str] = Counter()
        self.most = 0
        self.asked: list[str] = []

    async def capture(self, prompt: Prompt, rid: str) -> Answer:
        self.asked.append(prompt.key)
        self.under_way[prompt.key] += 1
        self.most = max(self.most, self.under_way.total())
        try:
            await self.behave(prompt)
        finally:
            self.under_way[prompt.key] -= 1
        return Answer(dumps=(), next_token=1, cached_tokens=0)


async def answer(_: Prompt) -> None:
    await asyncio.sleep(0.01)


async def hang(_: Prompt) -> None:
    await asyncio.sleep(3600)


async def die_of_poison(prompt: Prompt) -> None:
    await asyncio.sleep(0.01)
    if prompt.key == "poison":
        raise EngineError("made up: out of memory")


def capture_all(pool: PoolEngine, keys: list[str]) -> list[Any]:
    async def work() -> list[Any]:
        jobs = [pool.capture(make_prompt(key), f"{PREFIX}{key}-0") for key in keys]
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 120)

    return asyncio.run(work())


def test_no_server_gets_more_at_once_than_it_takes_even_when_it_is_the_last():
    one, two = Scripted("http://one", die_of_poison), Scripted("http://two", answer)
    pool = PoolEngine([one, two], lambda _: None)
    results = capture_all(pool, ["poison", *(f"p{i}" for i in range(30))])
    assert all(isinstance(result, Answer) for result in results)
    assert two.most == 3


def test_what_hangs_at_a_server_that_is_given_up_is_taken_back_at_once():
    async def hang_unless_poison(prompt: Prompt) -> None:
        await (die_of_poison if prompt.key == "poison" else hang)(prompt)

    one, two = Scripted("http://one", hang_unless_poison), Scripted("http://two", answer)
    results = capture_all(PoolEngine([one, two], lambda _: None), ["poison", *"abcdefg"])
    assert len(one.asked) > 1
    assert all(isinstance(result, Answer) for result in results)


def test_a_prompt_that_kills_servers_is_set_aside_before_the_last_one():
    servers = [Scripted(f"http://{name}", die_of_poison) for name in ("one", "two", "three")]
    pool = PoolEngine(servers, lambda _: None)
    results = capture_all(pool, [*(f"p{i}" for i in range(5)), "poison", *(f"q{i}" for i in range(20))])
    (killer,) = [result for result in results if not isinstance(result, Answer)]
    assert isinstance(killer, ServerKillerError)
    assert isinstance(killer, DataError)  # the client records this one sample, and the run goes on
    assert "poison: 2 servers failed while it was under way" in str(killer)
    assert len(pool.lost) == 2
    again = capture_all(PoolEngine([servers[2]], lambda _: None), ["p9"])
    assert isinstance(again[0], Answer)


def test_a_prompt_that_was_set_aside_is_not_sent_again_by_the_clients_second_try():
    servers = [Scripted(f"http://{name}", die_of_poison) for name in ("one", "two", "three")]
    pool = PoolEngine(servers, lambda _: None)
    for _ in range(2):
        assert [type(result) for result in capture_all_again(pool, "poison")] == [ServerKillerError]
    assert sum(server.asked.count("poison") for server in servers) == 2


def capture_all_again(pool: PoolEngine, key: str) -> list[Any]:
    return capture_all(pool, [key])


def test_a_killer_among_the_last_two_servers_is_named():
    servers = [Scripted(f"http://{name}", die_of_poison) for name in ("one", "two")]
    (fault,) = capture_all(PoolEngine(servers, lambda _: None), ["poison"])
    assert isinstance(fault, NoServerLeftError)
    assert "under way at more than one of them: poison" in str(fault)


def test_a_capture_that_is_cancelled_is_cancelled_at_the_server_and_asks_no_other():
    one, two = Scripted("http://one", hang), Scripted("http://two", hang)
    pool = PoolEngine([one, two], pytest.fail)

    async def cancel() -> None:
        job = asyncio.create_task(pool.capture(make_prompt("a"), f"{PREFIX}a-0"))
        await asyncio.sleep(0.05)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(cancel())
    assert (one.asked + two.asked, one.under_way.total()) == (["a"], 0)


def test_a_fault_of_one_prompt_is_the_prompts_and_not_the_servers():
    async def refuse(prompt: Prompt) -> None:
        raise DataError(f"{prompt.key} is too long")

    one, two = Scripted("http://one", refuse), Scripted("http://two", refuse)
    pool = PoolEngine([one, two], pytest.fail)
    (fault,) = capture_all(pool, ["a"])
    assert "a is too long" in str(fault)
    assert pool.lost == ()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"device": "cuda"}, "differ in device: http://one has cpu, http://two has cuda"),
        (
            {"versions": {"sglang": "0.5.16"}},
            "differ in versions: http://one has torch .*, http://two has sglang 0.5.16",
        ),
    ],
)
def test_servers_that_are_not_alike_are_refused(other: dict[str, Any], words: str):
    one, two = Scripted("http://one", answer), Scripted("http://two", answer, **other)
    with pytest.raises(UnlikeServersError, match=words):
        PoolEngine([one, two], pytest.fail)


def test_the_commands_of_all_servers_go_into_the_record():
    one = Scripted("http://one", answer, command=("sglang", "--port", "1"))
    two = Scripted("http://two", answer, command=("sglang", "--port", "2"))
    facts = PoolEngine([one, two], pytest.fail).facts
    assert facts.command == ("sglang", "--port", "1", ";", "sglang", "--port", "2")


def test_two_addresses_of_one_server_are_refused_by_the_trial(start: Start, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("eaglehs.extraction.trial.TRIAL_TIMEOUT_S", 0.3)
    fake, _ = start()
    other = tmp_path / "other"
    other.mkdir()
    (other / "capture.json").write_bytes((fake.settings.dump_dir / "capture.json").read_bytes())
    expected = Expected(model="tiny", layers=(1, 2), rid_prefix=PREFIX, dump_dir=other)
    with pytest.raises(ServerRefusedError, match="no dump came"), attached_server(fake.url, expected, Silent()):
        pass
