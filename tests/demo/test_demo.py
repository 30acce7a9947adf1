"""`eaglehs demo` as a newcomer runs it, and what keeps it from harming a folder or hiding a fault."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.ledger import Ledger
from eaglehs.schemas.manifest import DatasetFolder, Manifest
from eaglehs.schemas.run import RunFolder

import eaglehs
from eaglehs.demo.demo import DemoFolder, StreamMismatchError, check_same_bits, claim_folder

STAGES = ["imports", "model", "extract", "pack", "verify", "load_dataset", "eaglehs.stream"]
NUM_CONVERSATIONS = 34


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command as installed, with every way out to the network leading nowhere: the demo must need none."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HF_ENDPOINT"), "http://127.0.0.1:9")
    return subprocess.run(
        [str(Path(sys.executable).with_name("eaglehs")), "demo", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **nowhere, "HF_HOME": str(folder.parent / "hf"), "COLUMNS": "140"},
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoFolder, subprocess.CompletedProcess[str]]:
    root = tmp_path_factory.mktemp("newcomer") / "demo"
    done = run_demo(root)
    assert done.returncode == 0, done.stderr
    return DemoFolder(root), done


def test_it_prints_each_stage_the_arrays_and_what_to_do_next(demo):
    folder, done = demo
    for text in (*STAGES, "input_ids", "bfloat16", "layer_5", str(folder.dataset), "--profile kimi-k25"):
        assert text in done.stdout
    assert "extract:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["report", "card"])
def test_what_it_says_to_do_with_the_dataset_works(demo, tmp_path, command):
    folder, done = demo
    shutil.copytree(folder.dataset, tmp_path / "dataset")
    line = next(line.strip() for line in done.stdout.splitlines() if line.strip().startswith(f"eaglehs {command} "))
    words = line.replace(str(folder.dataset), str(tmp_path / "dataset")).split()
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("eaglehs")), *words[1:]], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, "before it can be published" in ran.stderr) == (0, False), ran.stderr


def test_every_conversation_is_in_several_whole_shards(demo):
    folder, _ = demo
    dataset = DatasetFolder(folder.dataset)
    manifest = read_record(Manifest, dataset.manifest)
    assert len(manifest.shards) >= 3
    assert (
        manifest.totals.num_samples == NUM_CONVERSATIONS == len(list(Ledger(RunFolder(folder.run).ledger).finished()))
    )
    assert manifest.layers == (2, 4, 5)
    assert not manifest.failed
    assert [dataset.shard(entry.name).stat().st_size for entry in manifest.shards] == [
        entry.size_bytes for entry in manifest.shards
    ]
    assert dataset.card.exists()
    assert dataset.index.exists()
    assert not [path for path in folder.root.rglob("*") if path.name.endswith(".part")]


def test_the_dataset_is_readable_by_stock_datasets_and_by_ours(demo):
    folder, _ = demo
    row = next(iter(load_dataset(str(folder.dataset), split="train", streaming=True)))
    ours = next(iter(eaglehs.stream(folder.dataset)))
    theirs = eaglehs.decode(row)
    assert theirs["final"].dtype == torch.bfloat16
    check_same_bits({theirs["key"]: theirs}, {ours["key"]: ours})


def test_a_second_start_computes_nothing_again_and_changes_no_byte(demo):
    folder, _ = demo
    kept = [path for path in sorted(folder.root.rglob("*")) if path.suffix in (".pt", ".tar", ".parquet")]
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in kept}
    done = run_demo(folder.root, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [stage["name"] for stage in report["stages"]] == STAGES
    assert [stage["name"] for stage in report["stages"] if not stage["is_new"]] == ["extract", "pack"]
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in before} == before


def test_a_demo_that_was_killed_between_shards_is_finished_to_the_same_bytes(demo):
    folder, _ = demo
    shards = {path: path.read_bytes() for path in sorted((folder.dataset / "data").glob("*.tar"))}
    (folder.dataset / "manifest.json").unlink()
    list(shards)[1].unlink()
    next(folder.run.glob("dumps/*/*.pt")).unlink()
    done = run_demo(folder.root)
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in shards} == shards


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.pt").write_text("x")
    with pytest.raises(UsageError, match="was not made by `eaglehs demo`"):
        claim_folder(DemoFolder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_another_version_made_is_made_anew(tmp_path: Path):
    folder = DemoFolder(tmp_path / "demo")
    claim_folder(folder)
    (folder.run / "dumps").mkdir(parents=True)
    claim_folder(folder)
    assert folder.run.exists()
    mark = folder.root / "demo.json"
    mark.write_text(mark.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    claim_folder(folder)
    assert not folder.run.exists()


def test_a_damaged_mark_still_says_whose_folder_it_is(tmp_path: Path):
    folder = DemoFolder(tmp_path / "demo")
    claim_folder(folder)
    folder.run.mkdir()
    (folder.root / "demo.json").write_text("{")
    claim_folder(folder)
    assert not folder.run.exists()


def sample(value: float) -> dict[str, object]:
    return {"key": "a", "final": torch.full((2, 4), value, dtype=torch.bfloat16)}


def test_other_bits_are_named_even_where_the_numbers_are_equal():
    check_same_bits({"a": sample(float("nan"))}, {"a": sample(float("nan"))})
    with pytest.raises(StreamMismatchError, match="a: final of load_dataset"):
        check_same_bits({"a": sample(0.0)}, {"a": sample(-0.0)})


def test_a_missing_sample_is_named():
    with pytest.raises(StreamMismatchError, match=r"load_dataset gave 1 sample, eaglehs\.stream 0"):
        check_same_bits({"a": sample(0.0)}, {})
