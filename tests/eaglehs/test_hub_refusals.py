"""Whatever the Hub refuses, each command says what to do, ends with 4 and shows no token."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from eaglehs.schemas.errors import EaglehsError
from huggingface_hub import HfApi

import eaglehs
from eaglehs.main import run
from tests.factories.datasets import SyntheticDataset
from tests.factories.published import READER, REPO, STRANGER, TOKENS, WRITER, Pusher, by_lfs, make_publishable, use_hub
from tests.fakes.hub import HubServer, start_hub

HOPELESS = "hf_NobodyKnowsThisOne"
SECRETS = (WRITER, READER, STRANGER, HOPELESS)
ADDRESS = f"hf://datasets/{REPO}"

PUSHES = ("push", "extract")
READS = ("verify", "inspect", "stream")
ALL = (*PUSHES, *READS)


@dataclass
class Case:
    """A Hub with a dataset, a changed copy of it, and commands that run in this process as a user would run them."""

    hub: HubServer
    folder: Path
    model: Path
    prompts: Path
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def run(self, command: str, revision: str = "") -> tuple[int, str]:
        """Return the exit code and all that was printed."""
        address = f"{ADDRESS}@{revision}" if revision else ADDRESS
        arguments = {
            "push": ["push", str(self.folder / "other"), REPO, "--yes"],
            "extract": [
                *("extract", "--model", str(self.model), "--engine", "transformers", "--prompts", str(self.prompts)),
                *("--limit", "2", "--out", str(self.folder / "run"), "--pack", str(self.folder / "packed")),
                *("--push", REPO, "--license", "mit"),
            ],
            "verify": ["verify", address],
            "deep": ["verify", address, "--deep"],
            "inspect": ["inspect", address],
        }
        if command == "stream":
            return self._stream(address)
        self.monkeypatch.setattr(sys, "argv", ["eaglehs", *arguments[command]])
        message, exit_code = run()
        printed = self.capsys.readouterr()
        return exit_code, printed.out + printed.err + message

    def _stream(self, address: str) -> tuple[int, str]:
        try:
            list(eaglehs.stream(address))
        except EaglehsError as error:
            return error.exit_code, f"error: {error}"
        return 0, ""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> tuple[SyntheticDataset, SyntheticDataset]:
    root = tmp_path_factory.mktemp("datasets")
    return make_publishable(root / "a", lengths=(4, 9)), make_publishable(root / "b", lengths=(5, 11, 2))


@pytest.fixture(scope="module")
def pushed(datasets, tmp_path_factory) -> Path:
    """The files of a Hub that has the first dataset."""
    hub = start_hub(tmp_path_factory.mktemp("hub") / "files", TOKENS)
    with by_lfs():
        Pusher(hub, datasets[0].root).push()
    hub.stop()
    return hub.state.root


@pytest.fixture
def case(datasets, pushed, tmp_path, tiny_model, prompt_file, capsys, monkeypatch) -> Case:
    shutil.copytree(pushed, tmp_path / "hub")
    shutil.copytree(datasets[1].root, tmp_path / "other")
    hub = start_hub(tmp_path / "hub", TOKENS)
    wait = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: wait(min(seconds, 0.002)))  # 23 seconds a call by itself
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    use_hub(monkeypatch, hub)
    for name, place in (("HF_HUB_CACHE", "cache"), ("HF_TOKEN_PATH", "no-login")):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path / place))
    with by_lfs():
        yield Case(hub, tmp_path, tiny_model, prompt_file, capsys, monkeypatch)
    hub.stop()


Set = Callable[[Case], None]


def token(value: str) -> Set:
    return lambda case: case.monkeypatch.setenv("HF_TOKEN", value)


def answer(path: str, status: int, message: str = "a fault on demand", **more: object) -> Set:
    fault = {"path": path, "status": status, "message": message, "times": 999, **more}
    return lambda case: case.hub.faults.append(fault)


def access(user: str, **settings: object) -> Set:
    def change(case: Case) -> None:
        HfApi(endpoint=case.hub.url, token=WRITER).update_repo_settings(REPO, repo_type="dataset", **settings)
        case.monkeypatch.setenv("HF_TOKEN", user)

    return change


def constant(name: str, value: object) -> Set:
    return lambda case: case.monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


LATER = "the same command goes on where it stopped"
ROWS: dict[str, tuple[Set, tuple[str, ...], str]] = {
    "no token": (token(""), PUSHES, "Set HF_TOKEN, or run: hf auth login"),
    "no token for this": (
        answer("/auth-check/write", 401, "Invalid username or password."),
        PUSHES,
        "Set HF_TOKEN to a token with write rights",
    ),
    "a wrong token": (token(HOPELESS), ALL, "The token from HF_TOKEN is wrong or has expired"),
    "a token that reads": (token(READER), PUSHES, "make a token of type write"),
    "not a member": (token(STRANGER), PUSHES, "have yourself added to the organization"),
    "private": (access(STRANGER, visibility="private"), READS, "or this account may not see it"),
    "private, no login": (access("", visibility="private"), READS, "for a private one set HF_TOKEN or run: hf auth"),
    "gated": (access(STRANGER, gated="manual"), READS, "gated and this account has no access. Ask for access"),
    "gated, no login": (access("", gated="manual"), READS, "gated and this account has no access. Ask for access"),
    "a bad card": (answer("/api/validate-yaml", 400), ("push",), "Make it anew: eaglehs card"),
    "somebody else pushed": (answer("/commit/main", 412), ("push",), "Run the same command again"),
    "refused content": (answer("/commit/", 400, "not like this"), ("push",), "400: not like this"),
    "over the quota": (answer("/preupload/", 403, "storage limit"), ("push",), "storage limit"),
    "too large": (answer("objects/batch", 413, "too large"), ("push",), "smaller shards, or more storage"),
    "refused bytes": (answer("/_lfs/put/", 403, "over the limit"), ("push",), "needs write rights in org, and room"),
    "too often": (answer("/", 429, headers={"Retry-After": "9999"}), ALL, "Wait for the rate limit"),
    "a busy server": (answer("/", 503), ALL, LATER),
    "nobody there": (constant("ENDPOINT", "http://127.0.0.1:9"), ALL, "Check the network and HF_ENDPOINT"),
    "offline": (constant("HF_HUB_OFFLINE", True), ALL, "Unset HF_HUB_OFFLINE"),
}


@pytest.mark.parametrize(("row", "command"), [(row, command) for row in ROWS for command in ROWS[row][1]])
def test_a_refusal_is_told_with_what_to_do_and_ends_with_4(case: Case, row: str, command: str):
    prepare, _, message = ROWS[row]
    prepare(case)
    code, printed = case.run(command)
    assert message in " ".join(printed.split())
    assert code == 4
    assert "Traceback" not in printed
    assert not [secret for secret in SECRETS if secret in printed]


@pytest.mark.parametrize("command", READS)
def test_a_revision_that_is_not_there_is_named(case: Case, command: str):
    code, printed = case.run(command, "v9")
    assert (code, "has no such branch, tag or commit. See what there is at" in printed) == (4, True)


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_repository_without_a_manifest_is_told_as_no_dataset(case: Case, command: str):
    HfApi(endpoint=case.hub.url, token=WRITER).delete_file("manifest.json", REPO, repo_type="dataset")
    code, printed = case.run(command)
    assert (code, "no dataset of eaglehs, or its upload was never finished" in printed) == (4, True)


def test_all_commands_work_where_nothing_is_refused(case: Case):
    assert [case.run(command)[0] for command in (*READS, "deep")] == [0, 0, 0, 0]
    assert case.run("push")[0] == 0


def test_a_server_that_gives_no_bytes_is_told_by_the_commands_that_want_them(case: Case):
    case.hub.faults.append({"path": r"/resolve/.*\.tar", "status": 403, "times": 999})
    assert [case.run(command)[0] for command in ("verify", "inspect", "stream")] == [0, 0, 4]
    code, printed = case.run("deep")
    assert (code, f"The token from HF_TOKEN may not read {REPO}" in printed, "write" in printed) == (4, True, False)


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_busy_server_is_not_taken_for_a_repository_without_a_manifest(case: Case, command: str):
    case.hub.faults.append({"path": "/resolve/", "status": 503, "times": 999})
    code, printed = case.run(command)
    assert (code, LATER in printed, "no dataset of eaglehs" in printed) == (4, True, False)
