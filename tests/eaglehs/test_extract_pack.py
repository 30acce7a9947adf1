"""`extract --pack` from the command line: the bytes of two steps, through kills, refusals and full disks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.manifest import Manifest

from eaglehs.main import run
from tests.eaglehs.cli import GO, eaglehs, ledger_lines, start_eaglehs, wait_until
from tests.factories.published import REPO, TOKENS, hub_environment
from tests.fakes.hub import HubServer, start_hub

PACK = ("--pack", "dataset", "--shard-size", "700kB")


@pytest.fixture(scope="module")
def extract(tiny_model, prompt_file):
    return ("extract", "--model", tiny_model, "--prompts", prompt_file, "--engine", "transformers")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, extract) -> Path:
    """A folder with the run and dataset of an extraction in two steps."""
    folder = tmp_path_factory.mktemp("two-steps")
    assert eaglehs(*extract, cwd=folder).returncode == 0
    assert eaglehs("pack", "--shard-size", "700kB", cwd=folder).returncode == 0
    return folder


def contents(folder: Path) -> dict[str, object]:
    """Return all that must be the same in two runs: shards by hash, the index, and what the manifest says of them."""
    dataset = folder / "dataset"
    manifest = read_record(Manifest, dataset / "manifest.json")
    return {
        "files": sorted(path.name for path in (dataset / "data").iterdir()),
        "shards": manifest.shards,
        "index": (dataset / "_index/samples.parquet").read_bytes(),
        "norms": manifest.state_norms,
        "totals": manifest.totals,
        "sizes": (manifest.shard_size_bytes, manifest.shuffle_seed, manifest.failed),
    }


def test_one_step_makes_the_dataset_of_two(extract, unbroken, tmp_path):
    done = eaglehs(*extract, *PACK, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dataset"]["totals"]["num_samples"] == 30
    assert contents(tmp_path) == contents(unbroken)
    assert not list(tmp_path.rglob("*.pt"))
    assert eaglehs("verify", "dataset", cwd=tmp_path).returncode == 0
    assert (tmp_path / "dataset/README.md").exists()
    packed = eaglehs("pack", "run", "--out", "other", cwd=tmp_path)
    assert packed.returncode == 2
    assert f"packed already (extract --pack), into {tmp_path / 'dataset'}" in packed.stderr
    assert not (tmp_path / "other").exists()
    otherwise = eaglehs(*extract, "--pack", "dataset", "--shard-size", "1MB", cwd=tmp_path)
    assert otherwise.returncode == 2
    assert "--shard-size 700000" in otherwise.stderr


@pytest.mark.parametrize("kill_at", [0, 9, 17, 29])
def test_a_killed_run_goes_on_to_the_bytes_of_an_unbroken_one(kill_at, extract, unbroken, tmp_path):
    run = tmp_path / "run"
    process = start_eaglehs(*extract, *PACK, cwd=tmp_path, holds_at=29)
    wait_until(lambda: (run / "run.json").exists() and len(ledger_lines(run)) >= kill_at, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = ledger_lines(run)
    done = eaglehs(*extract, *PACK, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_new"] == 30 - len(finished)
    assert ledger_lines(run)[: len(finished)] == finished
    assert contents(tmp_path) == contents(unbroken)
    assert not list(tmp_path.rglob(".*.part"))
    assert not (run / ".spool").exists()


def test_with_a_codec_one_step_makes_the_dataset_of_two(extract, unbroken, tmp_path):
    done = eaglehs(*extract, *PACK, "--codec", "planes-zstd", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob(".*.part"))
    assert eaglehs("verify", "dataset", cwd=tmp_path).returncode == 0
    packed = eaglehs(
        *("pack", unbroken / "run", "--out", "two", "--shard-size", "700kB", "--codec", "planes-zstd"), cwd=tmp_path
    )
    assert packed.returncode == 0, packed.stderr
    for path in (tmp_path / "two/data").iterdir():
        assert path.read_bytes() == (tmp_path / "dataset/data" / path.name).read_bytes()


@pytest.mark.parametrize("option", [("--shard-size", "1MB"), ("--codec", "planes-zstd")])
def test_options_of_pack_without_it_are_refused(extract, option, tmp_path):
    done = eaglehs(*extract, *option, cwd=tmp_path)
    assert done.returncode == 2
    assert "need --pack DATASET" in done.stderr


@pytest.mark.parametrize(("out", "dataset"), [("run", "./run/"), ("dataset/run", "dataset")])
def test_a_run_in_the_datasets_folder_is_refused(extract, out, dataset, tmp_path):
    done = eaglehs(*extract, "--out", out, "--pack", dataset, cwd=tmp_path)
    assert done.returncode == 2
    assert f"the run (--out {out}) would lie in the dataset's folder" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_tells_shards_room_and_time_and_writes_nothing(extract, tmp_path):
    done = eaglehs(*extract, *PACK, "--dry-run", "--json", "--rate", "100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["forecast"]
    assert plan["dataset"] == "dataset"
    assert plan["num_shards"] > 2
    assert plan["seconds"] == plan["pending_tokens"] / 100
    (space,) = plan["spaces"]
    assert space["needed_bytes"] >= plan["dataset_bytes"]
    assert plan["faults"] == []
    text = eaglehs(*extract, "--dry-run", cwd=tmp_path).stdout
    assert "time       unknown: nothing was measured yet" in text
    assert "when it is packed" in text
    assert list(tmp_path.iterdir()) == []


def finished_uploads(hub: HubServer, *, xet: bool) -> list[str]:
    """Return what came in whole: LFS objects or Xet's xorbs, once a time."""
    pattern = "/_xorb/" if xet else "/_lfs/put/"
    sent = [seen for seen in list(hub.log) if seen["path"].startswith(pattern) and seen["method"] in ("PUT", "POST")]
    return [seen["path"] for seen in sent if seen["status"] == 200]


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_a_killed_push_goes_on_with_nothing_computed_or_sent_twice(extract, unbroken, tmp_path, xet):
    hub = start_hub(tmp_path / "hub", TOKENS, bytes_per_s=400_000)
    push = (*PACK, "--push", REPO, "--delete-pushed", "--license", "mit")
    environment = hub_environment(hub, tmp_path / "home", xet=xet)
    process = start_eaglehs(*extract, *push, cwd=tmp_path, **environment)
    wait_until(lambda: hub.body_bytes("/_xorb/" if xet else "/_lfs/put/") > 0, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = ledger_lines(tmp_path / "run")
    hub.bytes_per_s = 0
    hub.wait_until_idle()
    environment = hub_environment(hub, tmp_path / "another-home", xet=xet)
    done = eaglehs(*extract, *push, "--json", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_new"] == 30 - len(finished)
    assert told["published"]["revision"] == hub.refs(REPO)["main"]
    shards = read_record(Manifest, unbroken / "dataset/manifest.json").shards
    there = {path: file["sha256"] for path, file in hub.files(REPO).items() if path.startswith("data/")}
    assert there == {entry.name: entry.sha256 for entry in shards}
    sent = finished_uploads(hub, xet=xet)
    assert len(sent) == len(set(sent)) > 0
    assert (hub.body_bytes("/_xorb/") > 0, hub.body_bytes("/_lfs/put/") > 0) == (xet, not xet)
    assert list((tmp_path / "dataset/data").iterdir()) == []
    assert eaglehs("verify", f"hf://datasets/{REPO}", "--deep", cwd=tmp_path, **environment).returncode == 0
    _assert_all_say_where_the_shards_are(tmp_path, len(shards), told["published"]["revision"])
    for command in (("report", "dataset"), ("card", "dataset", "--preview", "3")):
        assert eaglehs(*command, cwd=tmp_path, **environment).returncode == 0
    hub.stop()


def _assert_all_say_where_the_shards_are(folder: Path, num_shards: int, revision: str) -> None:
    """Look at a dataset whose shards are all on the Hub, without asking it."""
    address = f"hf://datasets/{REPO}@{revision}"
    verified = eaglehs("verify", "dataset", cwd=folder)
    assert verified.returncode == 0, verified.stderr
    assert f"{num_shards} shards that are only on the Hub" in verified.stdout
    assert f"check them with: eaglehs verify {address}" in verified.stdout
    assert f"on the Hub    {address}: data/train-00000.tar and " in eaglehs("inspect", "dataset", cwd=folder).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--push", REPO), "needs --pack"),
        ((*PACK, "--delete-pushed"), "need --push"),
        ((*PACK, "--push", REPO, "--delete-pushed", "--shuffle", "1"), "fills all at once"),
        ((*PACK, "--push", REPO), "--push needs --license"),
    ],
)
def test_options_of_a_push_that_can_not_be_are_refused(extract, tmp_path, options, message):
    done = eaglehs(*extract, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_push_that_would_be_refused_at_the_end_is_refused_before_anything_is_read(tmp_path, monkeypatch, more):
    """Model and prompts are not even looked for."""
    monkeypatch.chdir(tmp_path)
    terms = ("--license", "other", "--license-name", "Modified MIT")
    command = ("eaglehs", "extract", "--model", "./none", "--prompts", "none.jsonl", *PACK, "--push", REPO)
    monkeypatch.setattr(sys, "argv", [*command, *terms, *more])
    message, exit_code = run()
    assert exit_code == 2
    assert "such as modified-mit" in message
    assert not (tmp_path / "dataset").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def long_prompts(tmp_path) -> Path:
    """Forty prompts of 150 tokens: 6 MB of states of the tiny model."""
    path = tmp_path / "long.jsonl"
    rows = ({"id": str(n), "input_ids": [(n * 31 + t * 7) % 900 + 1 for t in range(150)]} for n in range(40))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_cannot_fit_is_refused_before_the_start_with_the_numbers(small_disk, long_prompts, tiny_model, tmp_path):
    arguments = ("extract", "--model", tiny_model, "--prompts", long_prompts, "--engine", "transformers")
    arguments += ("--loss-mask", "all", "--pack", small_disk / "dataset")
    for option in ((), ("--dry-run",)):
        done = eaglehs(*arguments, *option, cwd=tmp_path)
        assert done.returncode == 4, done.stderr
        assert "are free there" in done.stderr
        assert "are missing" in done.stderr
    assert not (tmp_path / "run/run.json").exists()


def test_a_disk_that_fills_in_mid_shard_is_named_and_the_same_command_goes_on(
    small_disk, long_prompts, tiny_model, tmp_path
):
    arguments = ("extract", "--model", tiny_model, "--prompts", long_prompts, "--engine", "transformers")
    arguments += ("--loss-mask", "all", "--limit", "16", "--pack", small_disk / "dataset", "--json")
    process = start_eaglehs(*arguments, cwd=tmp_path, holds_at=2)
    wait_until(lambda: len(ledger_lines(tmp_path / "run")) >= 2, process)
    with (small_disk / "other").open("wb") as other:  # somebody else fills the disk
        try:
            while True:
                other.write(bytes(65536))
                other.flush()
        except OSError:
            pass
    (tmp_path / GO).touch()
    assert process.wait(timeout=120) == 4
    said = (tmp_path / "out.txt").read_text()
    assert "No space left on device" in said
    assert "bytes are free there" in said
    kept = len(ledger_lines(tmp_path / "run"))
    (small_disk / "other").unlink()
    done = eaglehs(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_new"] == 16 - kept
    assert eaglehs("verify", small_disk / "dataset", cwd=tmp_path).returncode == 0


def test_a_dataset_folder_of_another_run_is_refused_and_another_can_be_given(extract, tmp_path):
    (tmp_path / "taken/data").mkdir(parents=True)
    (tmp_path / "taken/data/train-00007.tar").write_bytes(b"somebody's")
    refused = eaglehs(*extract, "--limit", "3", "--pack", "taken", cwd=tmp_path)
    assert refused.returncode == 2
    assert "train-00007.tar was not written by a pack of this run" in refused.stderr
    done = eaglehs(*extract, "--limit", "3", "--pack", "free", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    packed = json.loads(done.stdout)["dataset"]
    assert (packed["dataset"], packed["totals"]["num_samples"]) == ("free", 3)
    assert json.loads((tmp_path / "run/run.json").read_text())["packing"]["dataset"] == str(tmp_path / "free")
