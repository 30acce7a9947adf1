"""A server that was ready while we ourselves stood still (Ctrl-Z, a suspended machine) is not given up."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from eaglehs.extraction import server_ready, trial
from eaglehs.extraction.server import AttachedServer
from eaglehs.extraction.server_checks import Expected
from eaglehs.extraction.server_ready import ServerStartTimeoutError, wait_for_first_token
from eaglehs.extraction.trial import try_capture
from eaglehs.schemas.progress import Silent

from tests.fakes.sglang_server import FakeSettings, FakeSglang, Faults


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the waits: it goes on when a test says so."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, sleep=time.sleep)
    for module in (server_ready, trial):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSglang]:
    fake = FakeSglang(FakeSettings(dump_dir=tmp_path), Faults(unready_times=1)).start()
    yield fake
    fake.stop()


def attached(fake: FakeSglang) -> AttachedServer:
    expected = Expected(model="tiny", layers=(1, 2), rid_prefix="eh-run1-", dump_dir=fake.settings.dump_dir)
    return AttachedServer(fake.url, expected, api_key=None)


def test_a_server_that_got_ready_meanwhile_is_asked_once_more(
    fake: FakeSglang, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    server = attached(fake)

    def stand_still(_: float) -> None:
        clock.now += 1000

    monkeypatch.setattr(clock, "sleep", stand_still)  # after the first answer, which was 503
    wait_for_first_token(server, 60, Silent())
    assert len(fake.requests) == 1


def test_a_server_that_is_asked_too_late_for_the_first_time_is_asked_all_the_same(
    clock: SimpleNamespace, tmp_path: Path
):
    expected = Expected(model="tiny", layers=(1, 2), rid_prefix="eh-run1-", dump_dir=tmp_path)
    nobody = AttachedServer("http://127.0.0.1:1", expected, api_key=None)
    with pytest.raises(ServerStartTimeoutError, match="ConnectError"):
        wait_for_first_token(nobody, 0, Silent())


def test_the_dump_of_the_trial_that_came_meanwhile_counts(
    fake: FakeSglang, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    server, look, held = attached(fake), trial.dumps_in, []
    wait_for_first_token(server, 60, Silent())
    monkeypatch.setattr(fake, "dump", held.append)

    def looked(*where: Any) -> list[Any]:
        found = list(look(*where))
        if held:
            FakeSglang.dump(fake, held.pop())  # just after the look
            clock.now += 1000
        return found

    monkeypatch.setattr(trial, "dumps_in", looked)
    try_capture(server, server.expected, fake.info())
    assert not held
