"""`verify --model` from the command line: exit codes, one JSON document, the record and the card."""

import json
from pathlib import Path

import pytest
from eaglehs.cards.write import write_card

from tests.eaglehs.cli import eaglehs as run_eaglehs
from tests.factories.model_runs import make_model_run

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def eaglehs(*arguments: object, cwd: Path):
    return run_eaglehs(*arguments, cwd=cwd, **ONE_THREAD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model) -> Path:
    """A right run with its dataset, and a run whose layers are one too late."""
    root = tmp_path_factory.mktemp("verified")
    make_model_run(root / "run", tiny_model)
    make_model_run(root / "late", tiny_model, fault=lambda c: c.states(layer_4=c.hidden_states[6]))
    assert eaglehs("pack", cwd=root).returncode == 0
    return root


def test_right_numbers_are_kept_in_the_dataset_and_on_its_card(folder, tiny_model):
    arguments = ("verify", "dataset", "--model", tiny_model, "--samples", 2, "--max-tokens", 16)
    done = eaglehs(*arguments, "--write-report", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    record = json.loads((folder / "dataset" / "_index" / "verified.json").read_text())
    assert found["faults"] == found["model"]["faults"] == []
    assert found["model"] == record
    assert (len(record["samples"]), record["max_tokens"], record["kind"]) == (2, 16, "eaglehs.verified")
    assert "Computed again" in (folder / "dataset" / "README.md").read_text()
    plain = eaglehs("verify", "dataset", cwd=folder)
    assert plain.returncode == 0, plain.stderr  # the record is no foreign file


def test_a_record_of_another_packing_is_not_shown(folder):
    manifest = folder / "dataset" / "manifest.json"
    before = manifest.read_text()
    manifest.write_text(before.replace('"run_id": "0123abcd"', '"run_id": "0123abce"'))
    write_card(folder / "dataset")
    assert "Computed again" not in (folder / "dataset" / "README.md").read_text()
    manifest.write_text(before)
    write_card(folder / "dataset")
    assert "Computed again" in (folder / "dataset" / "README.md").read_text()


def test_wrong_numbers_exit_with_1_and_say_what_they_look_like(folder, tiny_model):
    done = eaglehs("verify", "late", "--model", tiny_model, cwd=folder)
    assert done.returncode == 1
    assert "late: 4 samples, 124 tokens" in done.stdout
    assert "layer_4      nearest hidden_states[6]" in done.stdout
    assert "fault: layer_4 holds hidden_states[6]: captured at layer 6" in done.stderr
    assert "Traceback" not in done.stderr


def test_disproved_numbers_take_an_older_record_away(folder, tmp_path, tiny_model):
    assert eaglehs("pack", folder / "late", "--out", "bad", cwd=tmp_path).returncode == 0
    stale = tmp_path / "bad" / "_index" / "verified.json"
    stale.write_text((folder / "dataset" / "_index" / "verified.json").read_text())
    done = eaglehs("verify", "bad", "--model", tiny_model, "--samples", 1, "--write-report", cwd=tmp_path)
    assert done.returncode == 1
    assert not stale.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dataset", "--write-report"), "--write-report has no effect without --model"),
        (("dataset", "--samples", "8"), "--samples has no effect without --model"),
        (("dataset", "--seed", "0"), "--seed has no effect without --model"),
        (("hf://datasets/org/name", "--quick"), "--quick has no effect on a dataset on the Hub"),
        (("run", "--model", "m", "--write-report"), "run is a run; --write-report writes into datasets"),
        (("hf://datasets/org/name", "--model", "m"), "--model compares local samples"),
    ],
)
def test_options_that_can_not_be_together_are_refused(arguments, message, folder):
    done = eaglehs("verify", *arguments, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
