"""`extract` on the embedded engine, from the command line: what it makes, refuses, survives and never does twice."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from eaglehs.extraction.engines.transformers import TransformersEngine
from eaglehs.extraction.final_check import WrongFinalError
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.dump import rid_prefix
from eaglehs.schemas.manifest import Manifest
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder

from eaglehs.engine_start import EngineSettings, open_engine
from eaglehs.extract_run import ExtractSettings
from eaglehs.extract_run import extract as extract_run
from tests.eaglehs.cli import GO, STARTED, eaglehs, ledger_lines, start_eaglehs, wait_until
from tests.factories.records import model_facts, run_record


@pytest.fixture
def extract(tiny_model, prompt_file):
    return ("extract", "--model", tiny_model, "--prompts", prompt_file, "--engine", "transformers")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, tiny_model, prompt_file) -> Path:
    """A folder with the run and dataset of an extraction that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    options = ("--model", tiny_model, "--prompts", prompt_file, "--engine", "transformers")
    assert eaglehs("extract", *options, cwd=folder).returncode == 0
    assert eaglehs("pack", "--shard-size", "2MB", cwd=folder).returncode == 0
    return folder


def shard_hashes(dataset: Path) -> list[tuple[str, str]]:
    manifest = read_record(Manifest, dataset / "manifest.json")
    return [(shard.name, shard.sha256) for shard in manifest.shards]


def test_the_short_forms_work_with_the_default_folders(unbroken):
    verified = eaglehs("verify", "dataset", "--json", cwd=unbroken)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["faults"] == []
    inspected = eaglehs("inspect", "dataset", "--json", cwd=unbroken)
    assert inspected.returncode == 0
    assert len(shard_hashes(unbroken / "dataset")) > 1


def test_stock_datasets_streams_what_the_short_forms_made(unbroken):
    import datasets

    import eaglehs as package

    stock = datasets.load_dataset(str(unbroken / "dataset"), split="train", streaming=True)
    keys = [package.decode(row)["key"] for row in stock]
    assert len(keys) == len(set(keys)) == 30


def test_a_dry_run_counts_and_writes_nothing(extract, tmp_path):
    done = eaglehs(*extract, "--dry-run", "--json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert plan["num_prompts"] == 30
    assert plan["size_bytes"] == plan["num_tokens"] * plan["bytes_per_token"]
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_computes_nothing_again(extract, unbroken):
    before = {path: path.stat().st_mtime_ns for path in (unbroken / "run").rglob("*.pt")}
    done = eaglehs(*extract, "--json", cwd=unbroken)
    assert done.returncode == 0
    assert json.loads(done.stdout)["num_new"] == 0
    assert {path: path.stat().st_mtime_ns for path in (unbroken / "run").rglob("*.pt")} == before


@pytest.mark.parametrize("kill_at", [0, 1, 11, 29])
def test_a_killed_run_goes_on_and_packs_to_the_bytes_of_an_unbroken_one(kill_at, extract, unbroken, tmp_path):
    run = tmp_path / "run"
    process = start_eaglehs(*extract, cwd=tmp_path, holds_at=29)
    wait_until(lambda: (run / "run.json").exists() and len(ledger_lines(run)) >= kill_at, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = ledger_lines(run)
    done = eaglehs(*extract, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_new"] == 30 - len(finished)
    assert ledger_lines(run)[: len(finished)] == finished
    assert not list(run.rglob(".*.part"))
    assert not (run / ".spool").exists()
    assert eaglehs("pack", "--shard-size", "2MB", cwd=tmp_path).returncode == 0
    assert shard_hashes(tmp_path / "dataset") == shard_hashes(unbroken / "dataset")


def test_what_a_killed_start_left_in_a_dump_folder_is_removed_and_nothing_else(tiny_model, tmp_path):
    record = run_record(layers=(1, 2), model=model_facts(name=str(tiny_model), revision="local-1"))
    prefix, spool = rid_prefix(record.run_id), tmp_path / "spool"
    left = [f"{prefix}a-100.000000-000006.pt", f".{prefix}b-100.000000-000006.pt.12-34.part"]
    kept = ["eh-other-a-100.000000-000006.pt", "notes.txt"]
    spool.mkdir()
    for name in (*left, *kept):
        (spool / name).write_bytes(b"")
    settings = EngineSettings(name="transformers", dump_dir=spool)
    with open_engine(settings, record, RunFolder(tmp_path / "run"), Silent()):
        assert sorted(os.listdir(spool)) == sorted(kept)
        (spool / left[0]).write_bytes(b"")  # as of a prompt that Ctrl-C cut off
    assert sorted(os.listdir(spool)) == sorted(kept)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_so_with_its_exit_code_and_keeps_what_it_has(stop, extract, tmp_path):
    process = start_eaglehs(*extract, cwd=tmp_path, holds_at=29)
    wait_until(lambda: len(ledger_lines(tmp_path / "run")) >= 3, process)
    process.send_signal(stop)
    (tmp_path / GO).touch()
    assert process.wait(timeout=120) == 130
    text = (tmp_path / "out.txt").read_text()
    assert "stopped; all finished samples are kept in run" in text
    assert "Traceback" not in text
    assert len(ledger_lines(tmp_path / "run")) >= 3


@pytest.mark.parametrize("after_s", [0, 0.05, 0.3, 1.5, 4.0])
def test_a_second_ctrl_c_at_any_moment_ends_without_a_traceback(after_s, extract, tmp_path):
    process = start_eaglehs(*extract, cwd=tmp_path)
    wait_until((tmp_path / STARTED).exists, process)
    time.sleep(after_s)
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert process.wait(timeout=120) in {0, 130}
    assert "Traceback" not in (tmp_path / "out.txt").read_text()


@pytest.mark.parametrize(
    ("option", "field"),
    [
        (("--layers", "1,4,6"), "list of layers"),
        (("--limit", "5"), "prompt set"),
        (("--loss-mask", "last"), "loss mask"),
    ],
)
def test_a_run_of_other_inputs_is_refused_and_left_as_it_is(option, field, extract, unbroken):
    before = (unbroken / "run" / "run.json").read_bytes()
    done = eaglehs(*extract, *option, cwd=unbroken)
    assert done.returncode == 2
    assert f"run was made with another {field}" in done.stderr
    assert (unbroken / "run" / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--layers", "2,30"), "layer 30 is out of range: the model has 8 decoder layers"),
        (("--layers", "2,2,5"), "layer 2 is given twice"),
        (("--layers=-1",), "layer -1 is out of range"),
        (("--concurrency", "4"), "--concurrency has no effect on the transformers engine"),
        (("--", "--tp-size", "2"), "SGLang's own arguments has no effect"),
        (("--deterministic",), "--deterministic has no effect on the transformers engine"),
        (("--allow-untested",), "--allow-untested has no effect on the transformers engine"),
        (("--profile", "no-such"), "there is no profile 'no-such'"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_a_contradiction_is_refused_before_anything_starts(option, message, extract, tmp_path):
    done = eaglehs(*extract, *option, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_prompts_of_which_too_many_must_be_skipped_are_refused_with_the_reasons(tiny_model, tmp_path):
    rows = [{"id": str(n), "input_ids": [n + 1, 99_999 if n % 2 else 5]} for n in range(10)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("extract", "--model", tiny_model, "--prompts", "p.jsonl", "--engine", "transformers")
    done = eaglehs(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "5 of 10 rows of p.jsonl would be skipped" in done.stderr
    allowed = eaglehs(*arguments, "--max-skipped-share", "0.5", "--json", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stderr
    summary = json.loads(allowed.stdout)
    assert sum(summary["skipped"].values()) == 5
    assert (summary["num_tokens"], summary["num_trainable"], summary["failed"]) == (10, 10, {})
    assert set(summary["state_norms"]) == {"layer_2", "layer_4", "layer_5", "final"}


def test_an_engine_whose_final_rows_are_shifted_is_stopped_at_its_second_sample(
    tiny_model, prompt_file, tmp_path, monkeypatch
):
    forward = TransformersEngine._forward

    def shifted(engine, key, ids):
        next_token = forward(engine, key, ids)
        engine._taps._states["final"] = engine._taps._states["final"].roll(1, 0)
        return next_token

    monkeypatch.setattr(TransformersEngine, "_forward", shifted)
    settings = ExtractSettings(
        model=str(tiny_model), prompts=str(prompt_file), out=tmp_path, engine=EngineSettings(name="transformers")
    )
    with pytest.raises(WrongFinalError, match=r"2 of \d samples checked .* or rows are shifted"):
        extract_run(settings, Silent())
    assert len(ledger_lines(tmp_path)) < 5
