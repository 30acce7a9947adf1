"""`eaglehs serve`: what it shows, what it refuses, and how it ends."""

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from eaglehs.schemas.errors import EngineError
from typer.testing import CliRunner

from eaglehs.commands.serve import serve
from tests.extraction.test_process import is_alive, wait_until
from tests.factories.models import write_tiny_llama
from tests.factories.records import model_facts
from tests.fakes.sglang_server import Faults, fake_site, to_environment


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command("serve", context_settings={"allow_extra_args": True})(serve)
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["serve", *arguments])


def test_print_shows_a_command_that_can_be_pasted_and_starts_nothing():
    shown = invoke("--model", "org/model", "--profile", "kimi-k25", "--print", "--", "--api-key", "sk-1")
    assert shown.exit_code == 0
    words = shlex.split(shown.stdout)
    assert words[0] == "env"
    assert "SGLANG_HS_LAYERS=3,31,59" in words
    assert "SGLANG_HS_DUMP_DIR=/dev/shm/eaglehs" in words
    assert words[words.index("--tp-size") + 1] == "8"
    assert words[-2:] == ["--api-key", "***"]


def test_print_as_json_has_command_and_environment_apart():
    shown = json.loads(invoke("--model", "m", "--layers", "5,2", "--port", "123", "--print", "--json").stdout)
    assert shown["command"][shown["command"].index("--port") + 1] == "123"
    assert shown["environment"]["SGLANG_HS_LAYERS"] == "2,5"
    assert shown["environment"]["SGLANG_HS_RID_PREFIX"] == "eh-"


def test_without_layers_those_of_the_model_are_shown(tmp_path: Path):
    model = write_tiny_llama(tmp_path)  # 8 layers
    shown = json.loads(invoke("--model", str(model), "--print", "--json").stdout)
    assert shown["environment"]["SGLANG_HS_LAYERS"] == "2,4,5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "1", "--print", "--", "--pp-size", "2"), r"--pp-size 2 \(pipeline parallelism\) can't be used"),
        (("--layers", "1", "--print", "--profile", "none"), "there is no profile 'none'"),
        (("--layers", "one", "--print"), "is not a list of numbers"),
    ],
)
def test_what_can_not_be_is_refused_with_the_reason(arguments: tuple[str, ...], message: str):
    refused = invoke("--model", "m", *arguments)
    assert refused.exit_code != 0
    assert re.search(message, str(refused.exception))


def test_an_argument_without_dashes_is_pointed_behind_them():
    assert "SGLang's own go after --" in invoke("--model", "m", "--print", "stray").stderr


def test_json_without_print_is_refused():
    assert "--json goes with --print" in invoke("--model", "m", "--json").stderr


def test_layers_that_the_model_does_not_have_are_refused_before_anything_starts(tmp_path: Path):
    model = write_tiny_llama(tmp_path)
    assert "layer 8 is out of range" in str(invoke("--model", str(model), "--layers", "2,8").exception)


def test_a_branch_is_served_as_the_commit_that_it_is_now(monkeypatch: pytest.MonkeyPatch):
    served: list[str | None] = []

    @contextlib.contextmanager
    def managed(settings, _):
        served.append(settings.revision)
        raise EngineError("not today")
        yield

    monkeypatch.setattr("eaglehs.extraction.serve.managed_server", managed)
    for found in ("c" * 40, "local-1"):
        monkeypatch.setattr(
            "eaglehs.extraction.serve.read_model_facts",
            lambda name, revision, found=found: model_facts(name=name, revision=found),
        )
        invoke("--model", "org/model", "--layers", "1,2")
    assert served == ["c" * 40, None]


def start_serve(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    monkeypatch.setenv("PYTHONPATH", str(fake_site(tmp_path / "site")))
    for name, value in to_environment(faults).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("EAGLEHS_SGLANG_PYTHON", raising=False)
    model = write_tiny_llama(tmp_path / "model")
    program = "import typer; from eaglehs.commands.serve import serve; typer.run(serve)"
    command = [sys.executable, "-c", program, "--model", str(model), "--dump-dir", str(tmp_path / "dumps")]
    with (tmp_path / "stderr").open("w") as stderr:
        return subprocess.Popen(command, stderr=stderr, stdout=subprocess.PIPE, text=True)


def test_it_runs_in_the_foreground_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = start_serve(tmp_path, Faults(forks="child"), monkeypatch)
    try:
        wait_until(lambda: "ready at" in (tmp_path / "stderr").read_text(), timeout_s=120)
        said = (tmp_path / "stderr").read_text()
        child = int(re.findall(r"child (\d+)", said)[0])  # the server's own output is shown
        assert re.search(
            r"capturing layers 2,4,5 into \S+dumps. Use it with: eaglehs extract --server http://127", said
        )
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode != 0
    assert out == ""  # stdout is for data
    assert not is_alive(child)
    assert not (tmp_path / "dumps").exists()


def test_a_server_that_dies_ends_it_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = start_serve(tmp_path, Faults(dies_after_s=0.5), monkeypatch)
    try:
        run.communicate(timeout=120)
    finally:
        run.kill()
    said = (tmp_path / "stderr").read_text()
    assert "torch.OutOfMemoryError" in said
    assert "the SGLang server ended with exit code 1" in said
