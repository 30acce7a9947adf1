"""A managed server's life, with a fake that fails as real ones do (cases 16 and 17 of the case log)."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from eaglehs.extraction import server_environment
from eaglehs.extraction.dump_folder import DumpFolderInUseError, ForeignFilesError
from eaglehs.extraction.engines.sglang import SglangEngine
from eaglehs.extraction.server import ServerDiedError, attached_server, managed_server
from eaglehs.extraction.server_checks import Expected, ServerRefusedError
from eaglehs.extraction.server_command import ContradictingArgumentError, ServerSettings
from eaglehs.extraction.server_environment import HIGHEST_PORT, PortInUseError, SglangMissingError, choose_port
from eaglehs.extraction.server_http import ServerAnswerError
from eaglehs.extraction.server_ready import ServerStartTimeoutError
from eaglehs.schemas.errors import EngineError, StorageError
from eaglehs.schemas.progress import Silent

from tests.extraction.test_process import is_alive, wait_until
from tests.factories.prompts import make_prompt
from tests.fakes.sglang_server import FakeSettings, FakeSglang, Faults, fake_site, to_environment

Settings = Callable[..., ServerSettings]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return a function that makes settings of a managed fake server with given faults."""
    monkeypatch.setenv("PYTHONPATH", str(fake_site(tmp_path / "site")))

    def make(faults: Faults | None = None, **changes: Any) -> ServerSettings:
        for name, value in to_environment(faults or Faults()).items():
            monkeypatch.setenv(name, value)
        defaults = {
            "model": "tiny",
            "layers": (1, 2),
            "dump_dir": tmp_path / "dumps",
            "rid_prefix": "eh-run1-",
            "log": tmp_path / "server.log",
            "start_timeout_s": 60.0,
            "stop_grace_s": 2.0,
        }
        return ServerSettings(**(defaults | changes))

    return make


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_server_is_started_checked_and_ended_with_nothing_left(settings: Settings, tmp_path: Path):
    with managed_server(settings(Faults(forks="child")), Silent()) as server:
        assert server.facts.name == "sglang"
        assert server.facts.versions == {"sglang": "0.5.23", "eaglehs_plugin": "0.1.0"}
        assert server.facts.device == "cpu"
        assert "--disable-radix-cache" in server.facts.command
        assert server.facts.environment["SGLANG_HS_LAYERS"] == "1,2"
        assert sorted(os.listdir(tmp_path / "dumps")) == [".eaglehs.lock", "capture.json"]
        port, pid = port_of(server.url), server.processes.pid
        child = int(re.findall(r"child (\d+)", (tmp_path / "server.log").read_text())[0])
        assert is_listening(port)
        assert is_alive(child)
    assert not is_listening(port)
    assert not is_alive(pid)
    assert not is_alive(child)
    assert not (tmp_path / "dumps").exists()


def test_a_fault_inside_the_block_ends_the_server_and_is_passed_on(settings: Settings):
    with pytest.raises(ZeroDivisionError), managed_server(settings(), Silent()) as server:
        port = port_of(server.url)
        raise ZeroDivisionError
    assert not is_listening(port)


def test_a_server_that_binds_and_never_answers_is_given_up_in_time(settings: Settings):
    with pytest.raises(ServerStartTimeoutError, match=r"did not generate a token within 2 s.*--start-timeout"):
        open_and_close(settings(Faults(is_silent=True), start_timeout_s=2.0))


def test_a_server_that_is_not_ready_yet_is_waited_for(settings: Settings):
    open_and_close(settings(Faults(unready_times=3)))


def test_a_server_that_dies_while_starting_is_noticed_at_once_with_its_last_lines(settings: Settings):
    with pytest.raises(ServerDiedError, match="exit code 1") as caught:
        open_and_close(settings(Faults(dies_after_s=0.5), start_timeout_s=3600.0))
    assert "torch.OutOfMemoryError: CUDA out of memory" in str(caught.value)
    assert isinstance(caught.value, EngineError)


def test_progress_tells_how_long_and_what_the_log_says(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eaglehs.extraction.server_ready.NOTE_EVERY_S", 0)
    notes: list[str] = []

    class Notes(Silent):
        def note(self, message: str) -> None:
            notes.append(message)

    with managed_server(settings(Faults(unready_times=3)), Notes()):
        pass
    assert notes[0].startswith("starting SGLang on port")
    # It refused connections first, and 503 was answered by a server that had printed its arguments.
    told = [note for note in notes if note.startswith("waiting for")]
    assert re.match(r"waiting for the server's first token, \d+ min \d\d s; its log: server_args=", told[-1])


def test_a_server_that_dies_in_mid_run_ends_it_with_its_last_lines(settings: Settings):
    with managed_server(settings(Faults(dies_on_request=True)), Silent()) as server:
        engine = SglangEngine(server, "eh-run1-")
        with pytest.raises(ServerDiedError, match="device-side assert"):
            asyncio.run(engine.capture(make_prompt("a"), "eh-run1-a-0"))


def test_an_api_key_is_used_and_never_written_down(settings: Settings, tmp_path: Path):
    with managed_server(settings(extra_args=("--api-key", "sk-verysecret")), Silent()) as server:
        assert server.api_key == "sk-verysecret"
        assert "sk-verysecret" not in " ".join(server.facts.command)
    log = (tmp_path / "server.log").read_text()
    assert "api_key='***'" in log
    assert "sk-verysecret" not in log


def test_a_server_without_the_plugin_is_refused_and_ended(settings: Settings, tmp_path: Path):
    with pytest.raises(ServerRefusedError, match="the plugin is not loaded in that server"):
        open_and_close(settings(Faults(has_no_plugin=True)))
    assert not (tmp_path / "dumps").exists()


def test_a_server_that_resolved_its_settings_otherwise_is_refused(settings: Settings):
    with pytest.raises(ServerRefusedError, match=r"disable_radix_cache = false \(prefix cache\)"):
        open_and_close(settings(Faults(info={"disable_radix_cache": False})))


def test_a_trial_request_without_a_dump_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eaglehs.extraction.trial.TRIAL_TIMEOUT_S", 0.3)
    with pytest.raises(ServerRefusedError, match=r"no dump came to .* in 0 s.*may dump into another folder"):
        open_and_close(settings(Faults(no_trial_dump=True)))


def test_a_server_over_nodes_whose_dumps_stay_away_is_told_where_rank_0_writes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eaglehs.extraction.trial.TRIAL_TIMEOUT_S", 0.3)
    with pytest.raises(ServerRefusedError, match=r"runs on 2 nodes, and its rank 0 writes .*on the node of rank 0"):
        open_and_close(settings(Faults(no_trial_dump=True, info={"nnodes": 2})))


def test_each_replica_of_a_data_parallel_server_is_tried(tmp_path: Path):
    fake = FakeSglang(FakeSettings(dump_dir=tmp_path), Faults(info={"dp_size": 3})).start()
    expected = Expected(model="tiny", layers=(1, 2), rid_prefix="eh-run1-", dump_dir=tmp_path)
    with attached_server(fake.url, expected, Silent()):
        trials = [request for request in fake.requests if "-trial-" in request["rid"]]
        assert [request["routed_dp_rank"] for request in trials] == [0, 1, 2]
        assert len({request["rid"] for request in trials}) == 3
    fake.stop()


def test_dumps_that_came_too_late_do_not_stay_in_the_folder_of_a_server_that_goes_on(tmp_path: Path):
    fake = FakeSglang(FakeSettings(dump_dir=tmp_path), Faults()).start()
    expected = Expected(model="tiny", layers=(1, 2), rid_prefix="eh-run1-", dump_dir=tmp_path)
    with attached_server(fake.url, expected, Silent()):
        for rid in ("eh-run1-a-0", "eh-run2-a-0"):
            (tmp_path / f"{rid}.000000-000006.pt").write_bytes(b"late")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capture.json", "eh-run2-a-0.000000-000006.pt"]
    fake.stop()


def test_arguments_that_contradict_capture_are_refused_before_anything_starts(settings: Settings, tmp_path: Path):
    with pytest.raises(ContradictingArgumentError, match="pipeline parallelism"):
        open_and_close(settings(extra_args=("--pp-size", "2")))
    assert not (tmp_path / "server.log").exists()
    assert not (tmp_path / "dumps").exists()


def test_a_port_in_use_is_named(settings: Settings, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} of 127.0.0.1 can't be used.*--server URL"):
            open_and_close(settings(port=port))
    assert not (tmp_path / "server.log").exists()


def test_a_free_port_is_taken_as_given_and_found_where_none_is():
    free = choose_port("127.0.0.1", None)
    assert choose_port("127.0.0.1", free) == free


@pytest.mark.parametrize("busy", [(), (1, 2)], ids=["all free", "the next two in use"])
def test_a_found_port_leaves_room_for_the_one_that_older_releases_add(monkeypatch: pytest.MonkeyPatch, busy: Any):
    asked: list[int] = []

    def bindable(host: str, port: int) -> int:
        asked.append(port)
        if len(asked) - 1 in busy:
            raise PortInUseError(host, port, "in use")
        return port or HIGHEST_PORT + 1

    monkeypatch.setattr(server_environment, "_bindable", bindable)
    assert choose_port("127.0.0.1", None) == asked[-1]
    assert len(asked) == 2 + len(busy)
    assert all(port + 10_000 <= 65_535 for port in asked)


def test_a_given_port_is_taken_however_high(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_environment, "_bindable", lambda _host, port: port)
    assert choose_port("127.0.0.1", 65_535) == 65_535


def test_a_dump_folder_of_a_running_server_is_refused(settings: Settings, tmp_path: Path):
    with managed_server(settings(), Silent()):
        with pytest.raises(DumpFolderInUseError, match=f"in use by process {os.getpid()}"):
            open_and_close(settings(log=tmp_path / "other.log"))
        assert (tmp_path / "dumps" / "capture.json").exists()


def test_a_dump_folder_with_foreign_files_is_refused_and_left_alone(settings: Settings, tmp_path: Path):
    (tmp_path / "dumps").mkdir()
    thesis = tmp_path / "dumps" / "thesis.tex"
    thesis.write_text("years of work")
    with pytest.raises(ForeignFilesError, match=r"1 file that is no dump, such as 'thesis.tex'"):
        open_and_close(settings())
    assert thesis.exists()


def test_what_a_killed_run_left_in_the_dump_folder_is_removed(settings: Settings, tmp_path: Path):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    (dumps / "eh-old-a-0.000000-000006.pt").write_bytes(b"whole")
    (dumps / ".eh-old-b-0.000000-000006.pt.123.7.part").write_bytes(b"half")
    (dumps / "capture.json").write_text("{}")
    with managed_server(settings(), Silent()):
        assert sorted(os.listdir(dumps)) == [".eaglehs.lock", "capture.json"]
    assert dumps.exists()  # it was there before
    assert os.listdir(dumps) == []


def test_a_dump_folder_without_room_is_refused_with_both_sizes(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StorageError, match=r"but two prefill batches \([\d,]+ tokens\) need"):
        open_and_close(settings(Faults(info={"chunked_prefill_size": 10**12})))


def test_a_python_without_sglang_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    made = settings()
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(SglangMissingError, match=r"has no SGLang.*pip install 'eaglehs\[sglang\]'"):
        open_and_close(made)
    with pytest.raises(SglangMissingError, match="/no/such/python can't be run"):
        open_and_close(settings(sglang_python="/no/such/python"))


def test_an_sglang_of_another_version_is_refused_before_it_starts(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = settings()
    monkeypatch.setenv("PYTHONPATH", str(fake_site(tmp_path / "old", version="0.4.9")))
    with pytest.raises(EngineError, match=r"has SGLang 0\.4\.9, expected 0\.5\.11 to 0\.5\.23\..*--allow-untested"):
        open_and_close(made)


def test_an_sglang_of_another_version_is_used_with_a_warning_where_the_user_says_so(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Notes(Silent):
        def note(self, message: str) -> None:
            notes.append(message)

    notes: list[str] = []
    made = settings(Faults(info={"version": "0.9.1"}), allow_untested=True)
    monkeypatch.setenv("PYTHONPATH", str(fake_site(tmp_path / "new", version="0.9.1")))
    with managed_server(made, Notes()) as server:
        assert server.facts.versions["sglang"] == "0.9.1"
    assert sum("SGLang 0.9.1 is untested" in note for note in notes) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_a_run_that_is_stopped_or_killed(settings: Settings, tmp_path: Path, number: int):
    made = settings(Faults(forks="daemon"), port=choose_port("127.0.0.1", None))
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from eaglehs.extraction.server import managed_server\n"
        "from eaglehs.extraction.server_command import ServerSettings\n"
        "from eaglehs.schemas.progress import Silent\n"
        f"settings = ServerSettings(model='tiny', layers=(1, 2), port={made.port}, rid_prefix='eh-run1-',\n"
        f"    dump_dir=Path({str(made.dump_dir)!r}), log=Path({str(made.log)!r}), stop_grace_s=2.0)\n"
        "with managed_server(settings, Silent()):\n"
        f"    Path({str(tmp_path / 'ready')!r}).touch()\n"
        "    asyncio.run(asyncio.sleep(3600))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        wait_until((tmp_path / "ready").exists, timeout_s=120)
        child = int(re.findall(r"child (\d+)", made.log.read_text() if made.log else "")[0])
        run.send_signal(number)
        errors = run.communicate(timeout=120)[1]
    finally:
        run.kill()
    if number != signal.SIGKILL:  # then it has waited for the end itself
        assert "KeyboardInterrupt" in errors
        assert not is_alive(child)
        assert not made.dump_dir.exists()
    wait_until(lambda: not is_alive(child))
    wait_until(lambda: not is_listening(made.port or 0))
    with managed_server(made, Silent()) as server:  # the same port and dump folder can be used again
        assert port_of(server.url) == made.port


@contextlib.contextmanager
def running_fake(tmp_path: Path, **faults: Any):
    fake = FakeSglang(FakeSettings(dump_dir=tmp_path, rid_prefix="eh-"), Faults(**faults)).start()
    try:
        yield fake
    finally:
        fake.stop()


def expected_in(tmp_path: Path, **changes: Any) -> Expected:
    return Expected(**({"model": "tiny", "layers": (1, 2), "rid_prefix": "eh-run1-", "dump_dir": tmp_path} | changes))


@pytest.mark.parametrize("old_info_path", [False, True])
def test_a_running_server_is_used_after_the_same_checks_and_left_running(tmp_path: Path, old_info_path: bool):
    stale = tmp_path / "eh-run1-a-0.000000-000006.pt"
    others = tmp_path / "eh-run2-a-0.000000-000006.pt"
    stale.write_bytes(b"")
    others.write_bytes(b"")
    with running_fake(tmp_path, old_info_path=old_info_path) as fake:
        with attached_server(f"{fake.url}/", expected_in(tmp_path), Silent()) as server:
            assert server.facts.versions["sglang"] == "0.5.23"
        assert httpx.get(f"{fake.url}/get_server_info", trust_env=False).status_code == 200
    assert not stale.exists()
    assert others.exists()


def test_a_server_of_another_model_is_refused(tmp_path: Path):
    with (
        running_fake(tmp_path, info={"model_path": "stranger"}) as fake,
        pytest.raises(ServerRefusedError, match="runs the model stranger, expected tiny"),
        attached_server(fake.url, expected_in(tmp_path), Silent()),
    ):
        pass


def test_nothing_at_the_address_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eaglehs.extraction.server.ATTACH_TIMEOUT_S", 0.5)
    with (
        pytest.raises(ServerStartTimeoutError, match=r"did not generate a token.*ConnectError"),
        attached_server("http://127.0.0.1:1", expected_in(tmp_path), Silent()),
    ):
        pass


def test_a_wrong_api_key_is_said_so(tmp_path: Path):
    fake = FakeSglang(FakeSettings(dump_dir=tmp_path, api_key="right"), Faults()).start()
    try:
        with (
            pytest.raises(ServerAnswerError, match="wants an API key"),
            attached_server(fake.url, expected_in(tmp_path), Silent(), api_key="wrong"),
        ):
            pass
    finally:
        fake.stop()


def open_and_close(settings: ServerSettings) -> None:
    with managed_server(settings, Silent()):
        pass
