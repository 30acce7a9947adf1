"""`eaglehs serve` on real SGLang on the CPU, and `extract --server` against it: started once, used by several runs."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from eaglehs.demo.tiny_model import write_tiny_model
from tests.eaglehs.cli import eaglehs, ledger_lines, start_eaglehs, wait_until
from tests.sglang_cpu.rig import PYTHON_VARIABLE, cpu_environment, sglang_python

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sglang_python() is None, reason=f"{PYTHON_VARIABLE} is not set"),
]

LAYERS = ("--layers", "2,4,5")


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_model) -> Iterator[tuple[str, Path, Path]]:
    """A server in the background: its address, its dump folder, what it printed."""
    python = sglang_python()
    assert python is not None
    folder = tmp_path_factory.mktemp("serve")
    dumps = folder / "dumps"
    process = start_eaglehs(
        "serve", "--model", tiny_model, "--profile", "cpu", "--dump-dir", dumps, *LAYERS,
        "--", "--chunked-prefill-size", "64", cwd=folder, **cpu_environment(python, folder / "rig"),
    )  # fmt: skip
    printed = folder / "out.txt"
    try:
        wait_until(lambda: "eaglehs: ready at" in printed.read_text(), process, timeout_s=400)
        found = re.search(r"ready at (http\S+),", printed.read_text())
        assert found is not None
        yield found[1], dumps, printed
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(found[1].rpartition(":")[2]))) != 0
        assert not dumps.exists()
    finally:
        process.kill()


def extract(served: tuple[str, Path, Path], *options: object, cwd: Path):
    url, dumps, _ = served
    return eaglehs("extract", "--server", url, "--dump-dir", dumps, *LAYERS, *options, "--json", cwd=cwd)


def test_a_run_goes_through_a_server_that_runs_already(served, tiny_model, prompt_file, tmp_path):
    done = extract(served, "--model", tiny_model, "--prompts", prompt_file, "--limit", 6, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_samples"] == 6
    assert eaglehs("pack", cwd=tmp_path).returncode == 0
    verified = eaglehs("verify", "dataset", "--json", cwd=tmp_path)
    assert json.loads(verified.stdout)["faults"] == []
    manifest = json.loads((tmp_path / "dataset" / "manifest.json").read_text())
    assert manifest["engine"]["name"] == "sglang"
    assert [path.name for path in served[1].iterdir() if path.suffix == ".pt"] == []


def test_another_run_uses_the_same_server(served, tiny_model, prompt_file, tmp_path):
    done = extract(served, "--model", tiny_model, "--prompts", prompt_file, "--limit", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(ledger_lines(tmp_path / "run")) == 3


def test_a_run_of_another_model_is_refused_with_both_names(served, tiny_model, prompt_file, tmp_path):
    other = tmp_path / "other"
    write_tiny_model(other)
    done = extract(served, "--model", other, "--prompts", prompt_file, "--limit", 3, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert f"the server runs the model {tiny_model}, expected {other}" in done.stderr
    assert ledger_lines(tmp_path / "run") == []


def test_a_run_of_other_layers_is_refused_with_both_lists(served, tiny_model, prompt_file, tmp_path):
    done = extract(
        served, "--layers", "1,2,3", "--model", tiny_model, "--prompts", prompt_file, "--limit", 3, cwd=tmp_path
    )
    assert done.returncode == 3, done.stderr
    assert "captures layers 2,4,5, expected 1,2,3" in done.stderr


def test_a_folder_that_the_server_does_not_dump_into_is_refused(served, tiny_model, prompt_file, tmp_path):
    url, _, _ = served
    (tmp_path / "elsewhere").mkdir()
    done = eaglehs(
        "extract", "--server", f"{url}={tmp_path / 'elsewhere'}", *LAYERS, "--model", tiny_model,
        "--prompts", prompt_file, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "has no capture.json" in done.stderr
