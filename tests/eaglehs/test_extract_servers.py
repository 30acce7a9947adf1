"""`extract` with `--server` given several times, from the command line, against fake servers of which one dies."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from eaglehs.extraction.server_checks import ServerRefusedError
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder

from eaglehs.engine_start import EngineSettings, open_engine
from tests.eaglehs.cli import eaglehs, ledger_lines
from tests.factories.records import model_facts, run_record
from tests.fakes.sglang_server import HIDDEN, FakeSettings, FakeSglang, Faults

NUM_PROMPTS = 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": HIDDEN,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


@pytest.fixture
def prompts(tmp_path) -> Path:
    draw = random.Random(3)
    rows = [{"id": f"p{n}", "input_ids": [draw.randrange(500) for _ in range(5 + n)]} for n in range(NUM_PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def start(tmp_path, model) -> Iterator[Callable[..., FakeSglang]]:
    fakes: list[FakeSglang] = []

    def begin(**faults) -> FakeSglang:
        folder = tmp_path / f"dumps{len(fakes)}"
        folder.mkdir()
        fakes.append(FakeSglang(FakeSettings(dump_dir=folder, model=str(model)), Faults(**faults)).start())
        return fakes[-1]

    yield begin
    for fake in fakes:
        fake.stop()


def extract(model: Path, prompts: Path, *fakes: FakeSglang, cwd: Path):
    servers = [part for fake in fakes for part in ("--server", f"{fake.url}={fake.settings.dump_dir}")]
    options = ("--model", model, "--prompts", prompts, "--layers", "1,2", "--loss-mask", "all", "--json")
    return eaglehs("extract", *options, *servers, cwd=cwd)


def test_two_servers_make_one_run_that_verifies(start, model, prompts, tmp_path):
    one, two = start(), start()
    done = extract(model, prompts, one, two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_samples"] == NUM_PROMPTS
    assert min(len(one.requests), len(two.requests)) > 5
    assert eaglehs("pack", cwd=tmp_path).returncode == 0
    verified = eaglehs("verify", "dataset", "--json", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert one.url in settings["server"]
    assert two.url in settings["server"]


def test_a_server_that_stops_capturing_is_given_up_and_the_run_is_whole(start, model, prompts, tmp_path):
    one, two = start(capture_fails=True), start()
    done = extract(model, prompts, one, two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"server {one.url} is given up (1 of 2)" in done.stderr
    finished = [json.loads(line)["key"] for line in ledger_lines(tmp_path / "run")]
    assert len(finished) == len(set(finished)) == NUM_PROMPTS


def test_a_run_whose_servers_all_fail_ends_with_each_ones_reason(start, model, prompts, tmp_path):
    one, two = start(capture_fails=True), start(capture_fails=True)
    done = extract(model, prompts, one, two, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "none of 2 servers is left" in done.stderr
    assert done.stderr.count("No space left on device") >= 2
    assert "Traceback" not in done.stderr


def test_a_server_that_fails_its_checks_is_told_before_any_prompt_is_sent(start, model, prompts, tmp_path):
    one, two = start(), start(info={"disable_radix_cache": False})
    done = extract(model, prompts, one, two, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "prefix cache" in done.stderr
    assert all(body["rid"].startswith("eaglehs-start-") or "-trial-" in body["rid"] for body in one.requests)


def test_a_server_that_was_started_with_another_commit_of_the_model_is_refused(start, tmp_path):
    fake = start(info={"model_path": "org/model", "revision": "b" * 40})
    settings = EngineSettings(servers=(f"{fake.url}={fake.settings.dump_dir}",))
    for commit, is_right in (("b" * 40, True), ("a" * 40, False)):
        record = run_record(layers=(1, 2), model=model_facts(name="org/model", revision=commit))
        opened = open_engine(settings, record, RunFolder(tmp_path), Silent())
        if is_right:
            with opened:
                continue
        with pytest.raises(ServerRefusedError, match=f"runs revision {'b' * 40} of org/model, expected {commit}"):
            opened.__enter__()


def test_a_release_that_is_not_known_is_refused_by_name_and_taken_where_the_user_says_so(
    start, model, prompts, tmp_path
):
    fake = start(info={"version": "0.7.1"})
    done = extract(model, prompts, fake, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "SGLang 0.7.1, expected 0.5.11 to 0.5.23" in done.stderr
    taken = eaglehs(
        "extract", "--model", model, "--prompts", prompts, "--layers", "1,2", "--loss-mask", "all",
        "--server", f"{fake.url}={fake.settings.dump_dir}", "--allow-untested", cwd=tmp_path,
    )  # fmt: skip
    assert taken.returncode == 0, taken.stderr
    assert "SGLang 0.7.1 is untested" in taken.stderr
