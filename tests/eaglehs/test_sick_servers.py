"""`extract` from the command line on servers of its own that fall ill: what is said, the exit code, what is on disk.

The server is the fake one (tests/fakes/sglang_server.py) in a process of its own, started, restarted and ended as a
real one is.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from eaglehs.schemas.ledger import LedgerEntry, SampleStatus, read_ledger

from tests.eaglehs.cli import PLAIN
from tests.fakes.sglang_server import HIDDEN, Faults, fake_site, to_environment
from tests.kills import client

NUM_PROMPTS = 24
POISON = 666

Extract = Callable[..., "Done"]


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    text: str


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    """Return a function that runs `eaglehs extract` on a fake server with given faults."""
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": HIDDEN,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    }
    (model / "config.json").write_text(json.dumps(config))
    site = fake_site(tmp_path / "site")
    write_prompts(tmp_path)

    def run(*options: object, **faults: Any) -> Done:
        arguments = ("extract", "--model", model, "--prompts", "prompts.jsonl", "--layers", "1,2", "--engine", "sglang")
        arguments += ("--sglang-python", sys.executable, "--dump-dir", tmp_path / "spool", "--start-timeout", 300)
        path = os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))
        done = run_command(*arguments, *options, cwd=tmp_path, PYTHONPATH=path, **to_environment(Faults(**faults)))
        assert not (tmp_path / "spool").exists()
        assert not list((tmp_path / "run").rglob(".*.part"))
        return done

    return run


def run_command(*arguments: object, cwd: Path, **environment: str) -> Done:
    (cwd / "out.txt").unlink(missing_ok=True)
    code = client.run(*arguments, cwd=cwd, environment={**PLAIN, **environment})
    text = (cwd / "out.txt").read_text()
    assert "Traceback" not in text, text
    return Done(code, text)


def write_prompts(folder: Path, *, poison: tuple[int, ...] = ()) -> None:
    rows = [
        {"id": f"p{number}", "input_ids": [POISON if number in poison else 7, *range(3, 20 + number)]}
        for number in range(NUM_PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def entries(folder: Path, status: SampleStatus) -> dict[str, LedgerEntry]:
    """Return the last entry of each id that ended so; an id is never finished twice."""
    found = [entry for entry in read_ledger(folder / "run" / "ledger.jsonl") if entry.status is status]
    by_id = {entry.id: entry for entry in found}
    assert status is SampleStatus.FAILED or len(by_id) == len(found)
    return by_id


def num_starts(folder: Path) -> int:
    return (folder / "run" / "server.log").read_text().count("server_args=")


def test_a_prompt_that_kills_the_server_is_set_aside_and_the_run_goes_on(extract: Extract, tmp_path: Path):
    write_prompts(tmp_path, poison=(5,))
    done = extract("--concurrency", 4, poison=POISON, poison_delay_s=0.3)
    assert done.code == 1, done.text
    assert f"{NUM_PROMPTS - 1} samples ({NUM_PROMPTS - 1} new)" in done.text
    assert " failed, 0 skipped" in done.text
    (failed,) = entries(tmp_path, SampleStatus.FAILED).values()
    assert failed.id == "p5"
    assert failed.reason.startswith("the server went down twice while it ran this prompt: the SGLang server ended")
    assert len(entries(tmp_path, SampleStatus.DONE)) == NUM_PROMPTS - 1
    assert "Starting it again (restart 1 of 3)" in done.text
    assert num_starts(tmp_path) in (2, 3)  # 2, if the others that were suspected came before it


def test_a_prompt_that_was_set_aside_comes_last_and_alone_the_next_time(extract: Extract, tmp_path: Path):
    write_prompts(tmp_path, poison=(5,))
    extract("--concurrency", 4, poison=POISON, poison_delay_s=0.3)
    before = num_starts(tmp_path)
    again = extract("--concurrency", 4, poison=POISON)
    assert again.code == 1
    assert num_starts(tmp_path) == before + 1  # one death convicts it again: no server is started after it
    assert extract().code == 0
    assert len(entries(tmp_path, SampleStatus.DONE)) == NUM_PROMPTS


def test_more_poison_than_may_fail_stops_the_run_with_what_is_finished_kept(extract: Extract, tmp_path: Path):
    write_prompts(tmp_path, poison=(2, 9, 16))
    done = extract("--concurrency", 1, "--max-failed", 1, poison=POISON)
    assert done.code == 1
    assert "2 samples failed, more than --max-failed 1 allows" in done.text
    assert "the server went down twice while it ran this prompt" in done.text
    assert len(entries(tmp_path, SampleStatus.DONE)) == NUM_PROMPTS - 3
    assert extract().code == 0


def test_a_server_that_dies_whatever_it_runs_is_started_again_so_often_and_no_more(extract: Extract, tmp_path: Path):
    done = extract("--max-restarts", 1, "--concurrency", 3, dies_on_request=True)
    assert done.code == 3
    assert "the server went down 2 times, more often than --max-restarts 1 allows" in done.text
    assert "CUDA error: device-side assert triggered" in done.text
    assert num_starts(tmp_path) == 2
    assert not entries(tmp_path, SampleStatus.FAILED)
    assert extract().code == 0


def test_a_server_that_hangs_is_started_again(extract: Extract, tmp_path: Path):
    done = extract("--stall-timeout", 5, "--concurrency", 4, "--max-restarts", 2, hangs_after=15)
    assert done.code == 0, done.text
    assert "has sent no answer and no dump for 5 s, with 4 requests under way" in done.text
    assert len(entries(tmp_path, SampleStatus.DONE)) == NUM_PROMPTS
    assert num_starts(tmp_path) == 2


def test_without_restarts_a_dead_server_ends_the_run_with_its_own_last_words(extract: Extract, tmp_path: Path):
    write_prompts(tmp_path, poison=(20,))
    done = extract("--max-restarts", 0, "--concurrency", 1, poison=POISON)
    assert done.code == 3
    assert "the SGLang server ended with exit code 1" in done.text
    assert "server.log ends with" in done.text
    assert len(entries(tmp_path, SampleStatus.DONE)) == 20


def test_a_server_that_never_gets_ready_is_given_up_and_not_started_again(extract: Extract, tmp_path: Path):
    done = extract("--start-timeout", 3, is_silent=True)
    assert done.code == 3
    assert "did not generate a token within 3 s" in done.text
    assert "--start-timeout" in done.text
    assert "Starting it again" not in done.text
    assert num_starts(tmp_path) <= 1  # none where it had no time to say so
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503, "message": "The server is overloaded"},
        {"status": 500, "message": "made up", "first_times": 1},
        {"is_reset": True},
        {"is_doubled": True},
        {"aborts": True, "first_times": 1},
    ],
    ids=lambda fault: next(iter(fault)) + str(fault.get("status", "")),
)
def test_a_fault_that_passes_costs_no_sample(fault: dict[str, Any], extract: Extract, tmp_path: Path):
    """503 for a while, broken connections, rows prefilled twice after a retraction, a request that was given up."""
    done = extract("--concurrency", 4, **{"first_times": 6, **fault})
    assert done.code == 0, done.text
    assert len(entries(tmp_path, SampleStatus.DONE)) == NUM_PROMPTS
    assert any(entry.attempt % 100 for entry in entries(tmp_path, SampleStatus.DONE).values())


@pytest.mark.parametrize(
    "fault", [{"dump_delay_s": 0.4}, {"reverse_after": 4}, {"unready_times": 3}, {"decode_rows": 2}]
)
def test_a_slow_or_untidy_server_costs_nothing(fault: dict[str, Any], extract: Extract, tmp_path: Path):
    assert extract("--concurrency", 8, **fault).code == 0
    assert len(entries(tmp_path, SampleStatus.DONE)) == NUM_PROMPTS


def test_a_server_that_could_dump_more_than_the_folder_holds_is_used_since_the_spool_is_bounded(extract: Extract):
    done = extract(info={"chunked_prefill_size": 10**12})
    assert done.code == 0, done.text


def test_a_run_that_goes_on_with_another_server_than_before_says_what_is_other(extract: Extract, tmp_path: Path):
    write_prompts(tmp_path, poison=(20,))
    first = extract("--max-restarts", 0, "--concurrency", 1, "--", "--quantization", "fp8", poison=POISON)
    assert (first.code, "another engine" in first.text) == (3, False)
    same = extract("--max-restarts", 0, "--concurrency", 1, "--", "--quantization", "fp8", poison=POISON)
    assert (same.code, "another engine" in same.text) == (3, False)  # its port is another one, which does not matter
    other = extract("--concurrency", 1, "--", "--tp-size", 4)
    assert other.code == 0, other.text
    assert "than before (--quantization fp8 then, not now; --tp-size 4 now, not then): the rows" in other.text


def test_a_port_in_use_is_refused_before_anything_starts(extract: Extract, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = extract("--port", port)
    assert done.code == 2
    assert f"port {port}" in done.text
    assert not (tmp_path / "run" / "server.log").exists()


def test_a_stranger_at_the_address_is_told_from_sglang(extract: Extract, tmp_path: Path):
    class Stranger(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    server = HTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (tmp_path / "spool").mkdir()
        done = run_command(
            "extract", "--model", tmp_path / "model", "--prompts", "prompts.jsonl", "--layers", "1,2",
            "--server", f"http://127.0.0.1:{server.server_address[1]}", "--dump-dir", tmp_path / "spool", cwd=tmp_path,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert done.code == 3, done.text
    assert "gave no JSON object" in done.text
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_deterministic_inference_is_asked_for_and_written_down(extract: Extract, tmp_path: Path):
    assert extract("--deterministic").code == 0
    command = json.loads((tmp_path / "run" / "run.json").read_text())["engine"]["command"]
    assert "--enable-deterministic-inference" in command
