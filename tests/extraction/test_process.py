"""The guard and its group: nothing that was started outlives the one who started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from eaglehs.extraction import process
from eaglehs.extraction.process import ProcessGroup, ProcessSpec, tail_of

SLEEP = "import time; time.sleep(3600)"
FAMILY = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
daemon = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(os.getpid(), child.pid, daemon.pid, flush=True)
"""


def make_spec(program: str, log: Path, *, grace_s: float = 5.0, secrets: tuple[str, ...] = ()) -> ProcessSpec:
    return ProcessSpec(
        argv=(sys.executable, "-c", program), environment=os.environ, log=log, grace_s=grace_s, secrets=secrets
    )


def wait_until(claim: Callable[[], object], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def printed_pids(log: Path) -> list[int]:
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    return [int(text) for text in log.read_text().split()]


def test_stopping_ends_children_and_daemons_too(tmp_path: Path):
    log = tmp_path / "log"
    group = ProcessGroup(make_spec(FAMILY + SLEEP, log))
    pids = printed_pids(log)
    assert all(map(is_alive, pids))
    assert group.exit_code is None
    group.stop()
    assert not any(map(is_alive, pids))
    group.stop()  # a second call does nothing


def test_what_ignores_term_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_KILL_PATIENCE_S", 3600)  # it is the guard that kills, or nobody
    log = tmp_path / "log"
    ignore = "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True)\n"
    group = ProcessGroup(make_spec(ignore + SLEEP, log, grace_s=0.3))
    (pid,) = printed_pids(log)
    started = time.monotonic()
    group.stop()
    assert time.monotonic() - started >= 0.3
    assert not is_alive(pid)


def test_a_program_gets_term_first_and_may_end_in_order(tmp_path: Path):
    log = tmp_path / "log"
    orderly = """
import signal, sys, time
def end(*_):
    time.sleep(0.2)
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(3600)
"""
    group = ProcessGroup(make_spec(orderly, log, grace_s=120))
    wait_until(lambda: log.read_text() == "up\n")
    group.stop()
    assert log.read_text() == "up\ndrained\n"


@pytest.mark.parametrize(("program", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_a_program_that_ends_by_itself_is_noticed_with_its_code(tmp_path: Path, program: str, code: int):
    group = ProcessGroup(make_spec(program, tmp_path / "log"))
    assert group.wait(timeout_s=120) == code
    group.stop()


def test_what_a_dead_program_leaves_behind_is_ended(tmp_path: Path):
    log = tmp_path / "log"
    group = ProcessGroup(make_spec(FAMILY, log))
    assert group.wait(timeout_s=120) == 0
    assert not any(map(is_alive, printed_pids(log)))
    group.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_starter_is_killed_everything_ends(tmp_path: Path, number: signal.Signals):
    log = tmp_path / "log"
    program = f"""
import os, pathlib, time
from eaglehs.extraction.process import ProcessGroup, ProcessSpec
argv = {(sys.executable, "-c", FAMILY + SLEEP)!r}
group = ProcessGroup(ProcessSpec(argv=argv, environment=os.environ, log=pathlib.Path({str(log)!r}), grace_s=1.0))
os.fork()  # a worker that holds the lifeline open
time.sleep(3600)
"""
    starter = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    pids = printed_pids(log)
    os.kill(starter.pid, number)
    starter.wait()
    try:
        wait_until(lambda: not any(map(is_alive, pids)))
    finally:
        os.killpg(starter.pid, signal.SIGKILL)


def test_a_program_that_prints_without_end_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the guard reads from is full again by the time it has written it on."""
    monkeypatch.setattr(process, "_KILL_PATIENCE_S", 120)  # it is the guard that ends it
    pid_file = tmp_path / "pid"
    program = f"""
import os, pathlib
pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
while True:
    os.write(1, b"!\\n" * 30_000)
"""
    sink = tmp_path / "log"
    sink.symlink_to("/dev/null")
    group = ProcessGroup(make_spec(program, sink, grace_s=1.0))
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    group.stop()
    assert group.exit_code == 128 + signal.SIGTERM
    assert not is_alive(int(pid_file.read_text()))


def test_when_the_guard_is_killed_the_program_goes_with_it(tmp_path: Path):
    log = tmp_path / "log"
    group = ProcessGroup(make_spec(f"import os; print(os.getpid(), flush=True)\n{SLEEP}", log))
    (pid,) = printed_pids(log)
    os.kill(group.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    assert group.exit_code == -signal.SIGKILL
    group.stop()


def test_secrets_do_not_reach_the_log(tmp_path: Path):
    log = tmp_path / "log"
    program = "import time\nprint('key=sk-', end='', flush=True); time.sleep(0.3); print('12345, end')"
    group = ProcessGroup(make_spec(program, log, secrets=("sk-12345",)))
    group.wait(timeout_s=120)
    group.stop()
    assert log.read_text() == "key=***, end\n"


def test_a_program_that_can_not_be_started_says_so_in_the_log(tmp_path: Path):
    spec = ProcessSpec(argv=("/no/such/python",), environment=os.environ, log=tmp_path / "log")
    group = ProcessGroup(spec)
    assert group.wait(timeout_s=120) == 1
    assert "No such file" in group.tail(2)
    group.stop()


def test_the_tail_of_a_log_is_its_last_lines_that_say_something(tmp_path: Path):
    log = tmp_path / "log"
    assert tail_of(log, 3) == ""
    log.write_text("\n".join(f"line {number}" for number in range(100_000)) + "\n\n")
    assert tail_of(log, 2) == "line 99998\nline 99999"


def test_ctrl_c_while_stopping_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_KILL_PATIENCE_S", 3600)  # it is the guard that kills, and before the grace is over
    log = tmp_path / "log"
    ignore = "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True)\n"
    group = ProcessGroup(make_spec(ignore + SLEEP, log, grace_s=3600))
    (pid,) = printed_pids(log)
    wait = group.wait

    def interrupted(timeout_s: float | None = None) -> int | None:
        monkeypatch.setattr(group, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.stop()
    assert not is_alive(pid)
