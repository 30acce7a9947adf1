"""The SGLang engine against a fake server that misbehaves on purpose (cases 1, 3 and 23 of the case log among them)."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eaglehs.extraction.engines.sglang import (
    BusyServerError,
    CaptureFailedError,
    ConnectionLostError,
    LostRequestError,
    MissingRowsError,
    Patience,
    PromptTokensError,
    RowFaultError,
    ServerHangsError,
    SglangEngine,
)
from eaglehs.extraction.server import AttachedServer, ServerDiedError
from eaglehs.extraction.server_checks import Expected
from eaglehs.extraction.server_http import RequestRefusedError, ServerAnswerError
from eaglehs.schemas.dump import DumpName, RequestId
from eaglehs.schemas.errors import DataError, EngineError, StorageError

from tests.factories.prompts import make_prompt
from tests.fakes.sglang_server import FakeSettings, FakeSglang, Faults

PREFIX = "eh-run1-"
Start = Callable[..., tuple[FakeSglang, SglangEngine]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a fake server with given faults, and an engine for it."""
    fakes: list[FakeSglang] = []

    def begin(api_key: str | None = None, **faults: Any) -> tuple[FakeSglang, SglangEngine]:
        fake = FakeSglang(FakeSettings(dump_dir=tmp_path, api_key="secret" if api_key else None), Faults(**faults))
        fakes.append(fake.start())
        expected = Expected(model="tiny", layers=(1, 2), rid_prefix=PREFIX, dump_dir=tmp_path)
        server = AttachedServer(fake.url, expected, api_key=api_key)
        return fake, SglangEngine(server, PREFIX, patience=Patience(dump_s=0.6))

    yield begin
    for fake in fakes:
        fake.stop()


@pytest.fixture
def short_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for a server to die."""
    monkeypatch.setattr("eaglehs.extraction.engines.sglang._DEATH_NOTICE_S", 0.2)


def rid_of(key: str, attempt: int = 0) -> str:
    return str(RequestId(run="run1", key=key, attempt=attempt))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=120))


def dumps_left(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".pt"))


def test_a_prompt_comes_back_as_chunks_that_cover_it_in_order(start: Start):
    fake, engine = start()
    prompt = make_prompt("a", 150)
    answer = run(engine.capture(prompt, rid_of("a")))
    names = [DumpName.parse(path.name) for path in answer.dumps]
    assert [(name.start, name.end) for name in names] == [(0, 64), (64, 128), (128, 150)]
    assert all(path.exists() for path in answer.dumps)
    assert answer.cached_tokens == 0
    assert answer.next_token == int(sum(prompt.input_ids)) % 97
    assert fake.requests[-1] == {
        "input_ids": [int(token) for token in prompt.input_ids],
        "rid": rid_of("a"),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }


def test_requests_answered_in_reverse_order_get_their_own_rows(start: Start):
    _, engine = start(reverse_after=6)
    prompts = [make_prompt(f"k{number}", 3 + number) for number in range(6)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(engine.capture(prompt, rid_of(prompt.key)) for prompt in prompts))

    for prompt, answer in zip(prompts, run(all_at_once()), strict=True):
        (path,) = answer.dumps
        assert DumpName.parse(path.name).rid == rid_of(prompt.key)
        assert torch.load(path)["input_ids"].tolist() == list(prompt.input_ids)


def test_dumps_that_come_after_the_answer_are_waited_for(start: Start):
    _, engine = start(dump_delay_s=0.3)
    engine.patience = Patience()
    assert len(run(engine.capture(make_prompt("a", 70), rid_of("a"))).dumps) == 2


def test_rows_taken_from_the_prefix_cache_are_named_with_their_cause(start: Start, tmp_path: Path):
    _, engine = start(cached_tokens=32)
    with pytest.raises(MissingRowsError, match=r"rows 0\.\.31 of 40 are missing.*prefix cache.*--disable-radix-cache"):
        run(engine.capture(make_prompt("a", 40), rid_of("a")))


def test_dumps_that_come_short_are_an_error_with_the_missing_rows(start: Start, tmp_path: Path):
    _, engine = start(short_rows=32)
    with pytest.raises(MissingRowsError, match=r"rows 0\.\.31 of 40 are missing \(cached_tokens 0\)") as caught:
        run(engine.capture(make_prompt("a", 40), rid_of("a")))
    assert caught.value.missing == ((0, 32),)
    assert dumps_left(tmp_path) == []


def test_dumps_that_stay_away_are_an_error_with_what_the_plugin_says(start: Start):
    _, engine = start(no_dumps=True)
    with pytest.raises(MissingRowsError, match=r"rows 0\.\.5 of 6 are missing.*plugin says that it is ready"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_rows_that_come_twice_are_refused(start: Start, tmp_path: Path):
    _, engine = start(is_doubled=True)
    with pytest.raises(RowFaultError, match=r"rows 0\.\.\d+ came twice"):
        run(engine.capture(make_prompt("a", 40), rid_of("a")))


def test_capture_that_has_failed_ends_the_run_and_not_only_the_prompt(start: Start):
    _, engine = start(capture_fails=True)
    with pytest.raises(CaptureFailedError, match="No space left on device"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_a_status_file_that_is_gone_is_failed_capture(start: Start, tmp_path: Path):
    _, engine = start(no_dumps=True)
    (tmp_path / "capture.json").unlink()
    with pytest.raises(CaptureFailedError, match="status file is gone"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_rows_of_decode_steps_are_dropped(start: Start, tmp_path: Path):
    _, engine = start(decode_rows=2)

    async def twice() -> list[Path]:
        first = await engine.capture(make_prompt("a", 70), rid_of("a"))
        second = await engine.capture(make_prompt("b", 5), rid_of("b"))
        return [*first.dumps, *second.dumps]

    kept = run(twice())
    assert sorted(path.name for path in kept) == dumps_left(tmp_path)
    assert max(DumpName.parse(path.name).end for path in kept if path.name.startswith(rid_of("a"))) == 70


def test_a_late_dump_of_a_request_that_was_given_up_does_not_stay(start: Start, tmp_path: Path):
    fake, engine = start(dump_delay_s=0.001)
    engine.patience = Patience(dump_s=0.1)
    given_up, is_late_written, dump = threading.Event(), threading.Event(), fake.dump

    def late(body: dict[str, Any], **fault: Any) -> None:
        is_first = body["rid"] == rid_of("a")
        (given_up if is_first else is_late_written).wait(60)
        dump(body, **fault)
        if is_first:
            is_late_written.set()

    fake.dump = late  # type: ignore[method-assign]

    async def give_up_then_go_on() -> None:
        with pytest.raises(MissingRowsError):
            await engine.capture(make_prompt("a"), rid_of("a"))
        given_up.set()
        engine.patience = Patience()
        await engine.capture(make_prompt("a"), rid_of("a", attempt=1))

    run(give_up_then_go_on())
    assert dumps_left(tmp_path) == [f"{rid_of('a', attempt=1)}.000000-000006.pt"]


def test_dumps_of_another_run_are_left_alone(start: Start, tmp_path: Path):
    _, engine = start()
    foreign = tmp_path / "eh-run2-a-0.000000-000006.pt"
    foreign.write_bytes(b"another run's")
    run(engine.capture(make_prompt("a"), rid_of("a")))
    assert foreign.exists()


def test_another_number_of_tokens_than_were_sent_is_refused(start: Start, tmp_path: Path):
    _, engine = start(lost_ids=1)
    with pytest.raises(PromptTokensError, match="6 token ids were sent, the server ran 5"):
        run(engine.capture(make_prompt("a"), rid_of("a")))
    assert dumps_left(tmp_path) == []


def test_a_refused_prompt_carries_the_servers_own_text(start: Start):
    _, engine = start(status=400, message="The input (9000 tokens) is longer than the model's context length (8192)")
    with pytest.raises(RequestRefusedError, match=r"HTTP 400: The input \(9000 tokens\) is longer") as caught:
        run(engine.capture(make_prompt("a"), rid_of("a")))
    assert isinstance(caught.value, DataError)


def test_a_wrong_api_key_ends_the_run(start: Start):
    _, engine = start(api_key="wrong")
    with pytest.raises(ServerAnswerError, match="wants an API key"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_the_right_api_key_is_sent(start: Start):
    _, engine = start(api_key="secret")
    assert run(engine.capture(make_prompt("a"), rid_of("a"))).dumps


def test_a_broken_connection_to_a_server_that_answers_is_the_requests_alone(start: Start, short_notice: None):
    _, engine = start(is_reset=True)
    with pytest.raises(LostRequestError, match="eh-run1-a-0: the connection broke before the answer came"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_a_lost_connection_to_a_server_that_is_gone_ends_the_run(start: Start, short_notice: None):
    fake, engine = start()
    fake.stop()
    with pytest.raises(ConnectionLostError, match="was lost") as caught:
        run(engine.capture(make_prompt("a"), rid_of("a")))
    assert isinstance(caught.value, EngineError)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_to_be_asked_again(start: Start, status: int):
    _, engine = start(status=status, message="The request queue is full")
    with pytest.raises(BusyServerError, match=f"HTTP {status}: The request queue is full"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_a_server_that_stops_answering_is_given_up_after_the_stall_timeout(start: Start):
    _, engine = start(hangs_after=1)
    run(engine.capture(make_prompt("a"), rid_of("a")))
    engine.patience = Patience(stall_s=1.0)
    with pytest.raises(
        ServerHangsError, match="sent no answer and no dump for 1 s, with 1 request under way"
    ) as caught:
        run(engine.capture(make_prompt("b"), rid_of("b")))
    assert "--stall-timeout" in str(caught.value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The engine's time: it goes on when a test says so."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    for module in ("engines.sglang", "dump_watcher"):
        monkeypatch.setattr(f"eaglehs.extraction.{module}.time", clock)
    monkeypatch.setattr("eaglehs.extraction.engines.sglang._LOOK_EVERY_S", 0.01)
    return clock


def test_a_slow_server_that_still_moves_does_not_hang(start: Start, clock: SimpleNamespace):
    fake, engine = start()
    engine.patience = Patience(stall_s=1.2)
    dump, is_over = fake.dump, threading.Event()

    def hold(body: dict[str, Any], **fault: Any) -> None:
        if body["rid"] == rid_of("held"):
            is_over.wait(60)
        dump(body, **fault)

    fake.dump = hold  # type: ignore[method-assign]

    async def one_by_one() -> None:
        held = asyncio.create_task(engine.capture(make_prompt("held"), rid_of("held")))
        for number in range(4):  # longer in all than the stall timeout
            await engine.capture(make_prompt(f"k{number}"), rid_of(f"k{number}"))
            clock.now += 1.1
            await asyncio.sleep(0.05)  # and it is looked at
        is_over.set()
        await held

    run(one_by_one())


def test_dumps_alone_are_a_sign_of_life(start: Start, clock: SimpleNamespace):
    fake, engine = start()
    engine.patience = Patience(stall_s=1.0)
    write = fake.write

    def write_slowly(*what: Any) -> None:
        write(*what)
        while engine._watcher.moved_at < clock.now:  # until it is seen
            time.sleep(0.01)
        clock.now += 0.9
        time.sleep(0.05)

    fake.write = write_slowly  # type: ignore[method-assign]
    assert len(run(engine.capture(make_prompt("long", 300), rid_of("long"))).dumps) == 5


def test_an_answer_that_came_while_we_ourselves_stood_still_counts(start: Start, clock: SimpleNamespace):
    fake, engine = start()
    engine.patience = Patience(stall_s=1.0)
    may_answer, dump, looks = threading.Event(), fake.dump, []

    def hold(body: dict[str, Any], **fault: Any) -> None:
        dump(body, **fault)
        may_answer.wait(60)

    def look() -> None:
        """Is called at each look, before the clock is: at the second one we have stood still since the first."""
        looks.append(clock.now)
        clock.now = 2000.0 if len(looks) == 2 else 1000.0
        if len(looks) > 2:
            may_answer.set()

    fake.dump, engine.server.check_alive = hold, look  # type: ignore[method-assign]
    run(engine.capture(make_prompt("a"), rid_of("a")))
    assert len(looks) > 2


def test_dumps_that_came_while_we_ourselves_stood_still_count(start: Start, clock: SimpleNamespace):
    fake, engine = start(no_dumps=True)
    says = engine._plugin_says

    def stand_still() -> str:
        """Between the look that found no dump and the one at the clock."""
        fake.write(DumpName(rid=rid_of("a"), start=0, end=6), list(range(6)))
        clock.now += 1000
        return says()

    engine._plugin_says = stand_still  # type: ignore[method-assign]
    assert len(run(engine.capture(make_prompt("a"), rid_of("a"))).dumps) == 1


def test_a_server_found_dead_after_a_lost_connection_is_reported_with_its_last_lines(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    _, engine = start(is_reset=True)

    def is_dead() -> None:
        raise ServerDiedError(1, Path("server.log"), "CUDA error")

    monkeypatch.setattr(engine.server, "check_alive", is_dead)
    with pytest.raises(ServerDiedError, match=r"exit code 1. Its log server.log ends with:\nCUDA error"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_a_dump_folder_that_vanishes_ends_the_run(start: Start, tmp_path: Path):
    _, engine = start(no_dumps=True)
    engine._watcher.folder = tmp_path / "gone"
    with pytest.raises(StorageError, match="can't be read"):
        run(engine.capture(make_prompt("a"), rid_of("a")))


def test_a_cancelled_capture_leaves_no_dump(start: Start, tmp_path: Path):
    _, engine = start(short_rows=2)
    engine.patience = Patience()

    async def cancel() -> None:
        work = asyncio.create_task(engine.capture(make_prompt("a", 200), rid_of("a")))
        while len(dumps_left(tmp_path)) < 4:  # noqa: ASYNC110 - the fake's thread writes them
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run(cancel())
    assert dumps_left(tmp_path) == []


def test_nothing_is_looked_for_while_nothing_is_awaited(start: Start):
    _, engine = start()

    async def capture_then_rest() -> int:
        await engine.capture(make_prompt("a"), rid_of("a"))
        await asyncio.sleep(0.1)
        return len(asyncio.all_tasks())

    assert run(capture_then_rest()) == 2  # this coroutine and the one that bounds its time
