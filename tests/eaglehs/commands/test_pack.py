"""`eaglehs pack`, `verify` and `inspect` from the command line: default folders, exit codes, one JSON document."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.runs import SyntheticRun, make_run


def eaglehs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("eaglehs")), *arguments]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    return make_run(tmp_path / "run", lengths=[12] * 6)


def test_the_short_forms_go_from_run_to_verified_dataset(tmp_path: Path, run: SyntheticRun):
    packed = eaglehs(tmp_path, "pack", "--shard-size", "20kB")
    assert packed.returncode == 0, packed.stderr
    assert packed.stdout.startswith("dataset: 6 samples, 72 tokens")
    assert packed.stdout.count("\n") == 1
    assert (tmp_path / "dataset/README.md").read_text().startswith("---\n")
    verified = eaglehs(tmp_path, "verify")
    assert (verified.returncode, "0 faults" in verified.stdout) == (0, True)
    shown = eaglehs(tmp_path, "inspect")
    assert "6 of 6 prompts" in shown.stdout
    one = json.loads(eaglehs(tmp_path, "inspect", "run", "p3", "--json").stdout)
    assert (one["key"], one["status"], one["num_tokens"]) == ("p3", "done", 12)


def test_json_is_one_document_with_the_same_numbers(tmp_path: Path, run: SyntheticRun):
    packed = json.loads(eaglehs(tmp_path, "pack", "--json").stdout)
    assert (packed["totals"]["num_samples"], packed["is_unchanged"], packed["set_aside"]) == (6, False, [])
    assert json.loads(eaglehs(tmp_path, "pack", "--json").stdout)["is_unchanged"] is True
    report = json.loads(eaglehs(tmp_path, "verify", "dataset", "--json").stdout)
    assert (report["faults"], report["num_samples"]) == ([], 6)


def test_a_dataset_that_is_replaced_is_told_and_so_is_a_report_of_the_old_shards(tmp_path: Path, run: SyntheticRun):
    assert "replaced" not in eaglehs(tmp_path, "pack", "--shard-size", "20kB").stderr
    assert eaglehs(tmp_path, "report", "dataset").returncode == 0
    again = eaglehs(tmp_path, "pack", "--shard-size", "20kB").stderr
    assert "replaced" not in again
    assert "warning" not in again
    other = eaglehs(tmp_path, "pack", "--shard-size", "40kB")
    assert other.returncode == 0
    assert "dataset holds this run packed otherwise; it is replaced: " in other.stderr
    assert "warning: dataset/plots is of the shards before; make it anew: eaglehs report dataset\n" in other.stderr


def test_with_a_codec_the_same_commands_go_on(tmp_path: Path, run: SyntheticRun):
    assert eaglehs(tmp_path, "pack", "--codec", "planes-zstd").returncode == 0
    verified = eaglehs(tmp_path, "verify")
    assert (verified.returncode, "0 faults" in verified.stdout) == (0, True)
    assert "codec         planes-zstd\n" in eaglehs(tmp_path, "inspect").stdout
    assert "planes-zstd of 384" in eaglehs(tmp_path, "inspect", "dataset", "p3").stdout
    assert (tmp_path / "dataset/README.md").read_text().count("final.bf16.planes") >= 2
    unknown = eaglehs(tmp_path, "pack", "--codec", "gzip")
    assert unknown.returncode == 2
    assert "planes-zstd" in unknown.stderr


def test_a_bad_dump_is_named_and_the_command_exits_with_1(tmp_path: Path, run: SyntheticRun):
    os.truncate(run.dumps_of("p2")[0], 100)
    packed = eaglehs(tmp_path, "pack")
    assert packed.returncode == 1
    assert "set aside: p2 (id p2)" in packed.stderr
    assert packed.stdout.startswith("dataset: 5 samples")
    assert eaglehs(tmp_path, "verify", "dataset").returncode == 0
    verified = eaglehs(tmp_path, "verify", "run")
    assert (verified.returncode, verified.stderr.count("fault: ")) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pack", "nowhere"), "there is no folder nowhere"),
        (("pack", "--shard-size", "0"), "0 bytes"),
        (("pack", "--shard-size", "2XB"), "is not a size"),
        (("pack", "--shard-size", "60GB"), "too large"),
        (("pack", "--shard-multiple", "99"), "divisible by 99"),
        (("verify", "nowhere"), "there is no folder"),
        (("verify", "hf://models/org/name"), "hf://datasets/org/name"),
        (("inspect", "run", "zz"), "no sample with key or id 'zz'"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(tmp_path: Path, run: SyntheticRun, arguments, message):
    result = eaglehs(tmp_path, *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
