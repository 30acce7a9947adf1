"""What the client keeps, asks again, gives up and never does, when the engine or the disk misbehaves."""

import asyncio
import errno
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder.assemble import check_dumps
from eaglehs.builder.plan import DatasetLayout
from eaglehs.extraction.client import Client, ClientSettings, NothingAnsweredError, TooManyFailuresError
from eaglehs.extraction.engines.protocol import EngineDownError, PassingError
from eaglehs.extraction.interrupts import run_interruptible
from eaglehs.extraction.room import as_storage_error
from eaglehs.extraction.run_store import open_store
from eaglehs.extraction.spool import dump_bytes
from eaglehs.schemas.errors import DataError, EngineError, StorageError
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder

from tests.factories.prompts import make_prompt, make_prompts
from tests.factories.records import engine_facts, model_facts, run_record
from tests.fakes.engine import FakeEngine

LAYOUT = DatasetLayout(layers=(1, 2), hidden_size=32)


@pytest.fixture
def engine(tmp_path):
    return FakeEngine(tmp_path / "spool")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def open_run(folder, prompts):
    record = run_record(layers=(1, 2), model=model_facts(hidden_size=32), engine=engine_facts(name="fake"))
    store = open_store(folder, record, prompts)
    store.repair()
    return store


def start(engine, folder, prompts, **settings):
    """Run one start of an extraction to its end, as `eaglehs extract` does."""
    store = open_run(folder, prompts)
    store.begin(engine.facts)
    client = Client(engine, store, lambda p, a: check_dumps(p, a.dumps, LAYOUT), ClientSettings(**settings))
    return asyncio.run(client.run(store.pending(prompts), Silent())), store


def test_every_sample_is_kept_once_and_the_spool_is_empty_after(engine, folder):
    prompts = make_prompts(30)
    outcome, store = start(engine, folder, prompts)
    assert outcome.num_done == 30
    assert outcome.num_tokens == sum(prompt.num_tokens for prompt in prompts)
    assert {entry.key for entry in store.ledger.finished()} == {prompt.key for prompt in prompts}
    for entry in store.ledger.finished():
        for dump in entry.dumps:
            assert folder.dump_path(entry.key, dump.name).stat().st_size == dump.size_bytes
    assert list(engine.spool.iterdir()) == []


def test_no_more_requests_are_under_way_than_the_engine_takes(engine, folder):
    start(engine, folder, make_prompts(30))
    assert engine.most_under_way == engine.concurrency


def test_a_finished_run_asks_nothing_and_touches_nothing(engine, folder):
    prompts = make_prompts(10)
    start(engine, folder, prompts)
    before = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*.pt")}
    engine.asked.clear()
    assert open_run(folder, prompts).pending(prompts) == []
    assert not engine.asked
    assert {path: path.stat().st_mtime_ns for path in folder.root.rglob("*.pt")} == before


def test_samples_whose_dumps_are_gone_are_asked_again_and_only_they(engine, folder):
    prompts = make_prompts(10)
    _, store = start(engine, folder, prompts)
    lost = {entry.key: entry for entry in list(store.ledger.finished())[2:5]}
    for entry in lost.values():
        folder.dump_path(entry.key, entry.dumps[0].name).unlink()
    engine.asked.clear()
    outcome, _ = start(engine, folder, prompts)
    assert set(engine.asked) == set(lost)
    assert outcome.num_done == 3


def test_dumps_that_no_ledger_line_names_are_removed(engine, folder):
    prompts = make_prompts(3)
    start(engine, folder, prompts)
    orphan = folder.dump_path("p000", "eh-0123abcd-zz-0.000000-000003.pt")
    orphan.write_bytes(b"left by a kill")
    (orphan.parent / f".{orphan.name}.99.part").write_bytes(b"half")
    start(engine, folder, prompts)
    assert not orphan.exists()
    assert len(list(folder.root.glob("dumps/*/.*"))) == 0


def test_a_sample_that_fails_once_is_asked_again_under_a_new_request_id(engine, folder):
    def fail_first(prompt, number, answer):
        if number == 1:
            answer.dumps[0].unlink()
            raise DataError("dumps stayed away")
        return answer

    engine.faults["p001"] = fail_first
    outcome, _ = start(engine, folder, make_prompts(4))
    assert outcome.num_done == 4
    assert engine.asked["p001"] == 2
    assert len({rid for rid in engine.rids if "-p001-" in rid}) == 2


def test_a_second_start_never_uses_a_request_id_of_the_first(engine, folder):
    prompts = make_prompts(4)

    def die(prompt, number, answer):
        raise EngineError("the server is gone")

    engine.faults["p003"] = die
    with pytest.raises(EngineError):
        start(engine, folder, prompts)
    engine.faults.clear()
    start(engine, folder, prompts)
    assert len(set(engine.rids)) == len(engine.rids)


def test_a_sample_that_always_fails_is_recorded_with_its_reason_and_the_others_go_on(engine, folder):
    def cached(prompt, number, answer):
        return replace(answer, cached_tokens=2)

    engine.faults["p002"] = cached
    outcome, store = start(engine, folder, make_prompts(6))
    assert outcome.num_done == 5
    (failure,) = outcome.failures
    assert failure.key == "p002"
    assert "rows 0..1 are missing" in failure.reason
    assert "--disable-radix-cache" in failure.reason
    (entry,) = store.ledger.failed()
    assert entry.reason == failure.reason
    assert list(engine.spool.iterdir()) == []


def test_a_failed_sample_is_tried_again_by_the_next_start(engine, folder):
    prompts = make_prompts(4)
    engine.faults["p002"] = lambda prompt, number, answer: replace(answer, cached_tokens=2)
    start(engine, folder, prompts)
    engine.faults.clear()
    outcome, store = start(engine, folder, prompts)
    assert outcome.num_done == 1
    assert [*store.ledger.failed()] == []


def test_too_many_failures_stop_the_run_and_say_the_commonest_reason(engine, folder):
    prompts = make_prompts(20)
    for prompt in prompts[5:12]:
        engine.faults[prompt.key] = lambda prompt, number, answer: replace(answer, cached_tokens=2)
    with pytest.raises(TooManyFailuresError, match="4 samples failed, more than --max-failed 3"):
        start(engine, folder, prompts, max_failed=3)


def test_a_dead_engine_ends_the_run_with_what_was_finished_kept(engine, folder):
    prompts = make_prompts(12)

    def die(prompt, number, answer):
        raise EngineError("the server is gone", mend="See server.log")

    engine.faults["p006"] = die
    with pytest.raises(EngineError, match="the server is gone"):
        start(engine, folder, prompts)
    done = {entry.key for entry in open_run(folder, prompts).ledger.finished()}
    engine.faults.clear()
    engine.asked.clear()
    start(engine, folder, prompts)
    assert set(engine.asked) == {prompt.key for prompt in prompts} - done


def test_a_full_disk_ends_the_run_with_both_numbers_and_keeps_what_was_finished(engine, folder, monkeypatch):
    from eaglehs.extraction import run_store

    moved = []
    real = run_store._move

    def full_after_three(source: Path, target: Path) -> None:
        if len(moved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        moved.append(target)
        real(source, target)

    monkeypatch.setattr(run_store, "_move", full_after_three)
    prompts = make_prompts(8)
    with pytest.raises(StorageError, match=r"\d bytes\) can't be kept in .*No space left.* bytes are free"):
        start(engine, folder, prompts)
    monkeypatch.undo()
    outcome, store = start(engine, folder, prompts)
    assert outcome.num_done == 5
    assert len(list(store.ledger.finished())) == 8


def test_a_disk_that_goes_away_is_told_once_and_not_as_a_group_of_errors(engine, folder, monkeypatch):
    def is_gone(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    store = open_run(folder, make_prompts(8))
    store.begin(engine.facts)
    monkeypatch.setattr("shutil.disk_usage", is_gone)
    watching = Client(engine, store, None, ClientSettings(keep_dir=folder.root))
    with pytest.raises(StorageError, match=r"the disk of .*run can't be looked at: Stale file handle"):
        asyncio.run(watching.run(make_prompts(8), Silent()))
    assert not engine.asked

    reading = Client(engine, store, lambda p, a: is_gone(p), ClientSettings())
    with pytest.raises(OSError, match="Stale file handle") as told:
        asyncio.run(reading.run(make_prompts(8), Silent()))
    assert as_storage_error(told.value, folder.root).exit_code == 4


def test_a_row_of_another_request_never_counts(engine, folder):
    from tests.fakes.engine import dump_prompt

    prompts = make_prompts(3)

    def swapped(prompt, number, answer):
        answer.dumps[0].unlink()
        other = replace(prompt, input_ids=prompt.input_ids[::-1].copy())
        rid = engine.rids[-1]
        return replace(answer, dumps=(dump_prompt(engine.spool, other, rid, engine.layers, engine.hidden_size),))

    engine.faults["p001"] = swapped
    outcome, _ = start(engine, folder, prompts)
    assert [failure.key for failure in outcome.failures] == ["p001"]
    assert "token 0 is" in outcome.failures[0].reason


def busy(prompt, number, answer):
    answer.dumps[0].unlink()
    raise BusyError("HTTP 503: no free slot")


class BusyError(PassingError):
    concerns_all = True


def test_a_fault_that_passes_is_waited_out_beyond_the_tries_of_other_faults(engine, folder):
    engine.faults["p001"] = lambda prompt, number, answer: answer if number > 4 else busy(prompt, number, answer)
    outcome, _ = start(engine, folder, make_prompts(4), waits_s=(0.01,) * 5)
    assert outcome.num_done == 4
    assert engine.asked["p001"] == 5
    assert len(set(engine.rids)) == len(engine.rids)


def test_a_fault_that_does_not_pass_while_others_finish_is_the_samples(engine, folder):
    engine.faults["p001"] = busy
    capture = engine.capture

    async def last_after_the_others(prompt, rid):
        while engine.asked[prompt.key] == 2 and folder.ledger.read_bytes().count(b"\n") < 5:  # noqa: ASYNC110 - threads write it
            await asyncio.sleep(0.01)
        return await capture(prompt, rid)

    engine.capture = last_after_the_others
    outcome, store = start(engine, folder, make_prompts(6), waits_s=(0.05, 0.05))
    assert outcome.num_done == 5
    (entry,) = store.ledger.failed()
    assert entry.key == "p001"
    assert "HTTP 503: no free slot" in entry.reason


def test_a_fault_of_all_that_does_not_pass_is_the_engines_and_fails_no_sample(engine, folder):
    prompts = make_prompts(6)
    for prompt in prompts:
        engine.faults[prompt.key] = busy
    with pytest.raises(NothingAnsweredError, match=r"finished no request in 3 tries over 0 s.*HTTP 503: no free slot"):
        start(engine, folder, prompts, waits_s=(0.01, 0.01))
    store = open_run(folder, prompts)
    assert not store.ledger.entries
    assert list(engine.spool.iterdir()) == []


def test_room_that_comes_free_while_it_is_looked_for_is_waited_for(engine, folder, monkeypatch):
    is_freeing = [True]

    def check_room(keep_dir, needed_bytes):
        if is_freeing[0]:
            is_freeing[0] = False  # just after the look, and before its answer
            raise StorageError("the disk is full")

    monkeypatch.setattr("eaglehs.extraction.client.check_room", check_room)
    monkeypatch.setattr("eaglehs.extraction.client.ROOM_POLL_S", 0.01)
    outcome, _ = start(engine, folder, make_prompts(3), keep_dir=folder.root, frees_room=lambda: is_freeing[0])
    assert outcome.num_done == 3


def test_samples_that_wait_for_room_together_do_not_keep_each_other_out(engine, folder, monkeypatch):
    """A nearly full disk with nothing under way and nothing to be freed has room for one sample, and then the next."""
    needed = []

    def check_room(keep_dir, needed_bytes):
        needed.append(needed_bytes)
        if needed_bytes > 1.5 * dump_bytes(20, 1):
            raise StorageError("the disk is full")

    monkeypatch.setattr("eaglehs.extraction.client.check_room", check_room)
    monkeypatch.setattr("eaglehs.extraction.client.ROOM_POLL_S", 0.001)
    prompts = [make_prompt(f"p{number}", 20) for number in range(12)]
    outcome, _ = start(engine, folder, prompts, keep_dir=folder.root, bytes_per_token=1)
    assert outcome.num_done == 12
    assert max(needed) == 2 * dump_bytes(20, 1)  # it was looked at while one was under way, and waited for


def test_the_prompts_under_way_when_the_engine_goes_down_are_known(engine, folder):
    prompts = make_prompts(12)

    def die(prompt, number, answer):
        raise EngineDownError("the server is gone")

    engine.faults["p005"] = die
    store = open_run(folder, prompts)
    store.begin(engine.facts)
    client = Client(engine, store, lambda p, a: check_dumps(p, a.dumps, LAYOUT), ClientSettings())
    with pytest.raises(EngineDownError):
        asyncio.run(client.run(prompts, Silent()))
    assert "p005" in client.under_way
    assert len(client.under_way) <= engine.concurrency
    assert not set(client.under_way) & {entry.key for entry in store.ledger.finished()}


def test_a_sample_that_is_being_kept_when_the_engine_goes_down_is_counted(engine, folder):
    prompts = make_prompts(4)
    store = open_run(folder, prompts)
    store.begin(engine.facts)
    is_keeping, is_down, finish = threading.Event(), threading.Event(), store.finish

    def keep_slowly(*arguments):
        is_keeping.set()
        assert is_down.wait(60)
        return finish(*arguments)

    def die(prompt, number, answer):
        raise EngineDownError("the server is gone")

    capture = engine.capture

    async def last_dies(prompt, rid):
        while prompt.key == "p003" and not is_keeping.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)
        return await capture(prompt, rid)

    async def run():
        try:
            await client.run(prompts, Silent())
        finally:
            is_down.set()

    store.finish, engine.capture, engine.faults["p003"] = keep_slowly, last_dies, die
    client = Client(engine, store, lambda p, a: check_dumps(p, a.dumps, LAYOUT), ClientSettings())
    with pytest.raises(EngineDownError):
        run_interruptible(run())
    assert client.tally.num_done == len(list(store.ledger.finished())) > 0


def test_the_engine_has_its_next_request_while_a_sample_is_still_checked(tmp_path, folder):
    engine = FakeEngine(tmp_path / "spool", concurrency=1)
    prompts = make_prompts(6)
    store = open_run(folder, prompts)
    store.begin(engine.facts)
    asked_during_first_check = []

    def check(prompt, answer):
        if not asked_during_first_check:
            deadline = time.monotonic() + 60
            while sum(engine.asked.values()) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            asked_during_first_check.append(sum(engine.asked.values()))
        return check_dumps(prompt, answer.dumps, LAYOUT)

    outcome = asyncio.run(Client(engine, store, check, ClientSettings()).run(prompts, Silent()))
    assert outcome.num_done == 6
    assert asked_during_first_check[0] >= 2
    assert engine.most_under_way == 1
