"""`eaglehs push` as a user runs it: by Xet and by Git-LFS, read back by stock readers in processes of their own."""

import hashlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eaglehs.cards.licenses import CardTerms
from eaglehs.cards.write import write_card

from tests.eaglehs.cli import ENTRY, eaglehs, start_eaglehs, wait_until
from tests.factories.datasets import SyntheticDataset
from tests.factories.published import (
    READER,
    REPO,
    TOKENS,
    WRITER,
    assert_not_visible,
    assert_whole,
    hub_environment,
    make_publishable,
)
from tests.fakes.hub import HubServer, start_hub

HOPELESS = "hf_NobodyKnowsThisOne"

STOCK_READER = """
import hashlib, json, sys
from datasets import load_dataset
rows = load_dataset(sys.argv[1], split="train", streaming=True)
bits = lambda row: hashlib.sha256(b"".join(row[name].tobytes() for name in sorted(row) if name.endswith(".npy")))
print(json.dumps({row["__key__"]: bits(row).hexdigest() for row in rows}))
"""

WEBDATASET_READER = """
import hashlib, json, os, sys
import webdataset
endpoint, token = os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"]
fetch = f"pipe:curl -sfL -H 'Authorization: Bearer {token}' {endpoint}/datasets/{sys.argv[1]}/resolve/main/data/"
urls = [f"{fetch}train-0000{number}.tar" for number in range(4)]
rows = webdataset.WebDataset(urls, shardshuffle=False).decode()
bits = lambda row: hashlib.sha256(b"".join(row[name].tobytes() for name in sorted(row) if name.endswith(".npy")))
print(json.dumps({row["__key__"]: bits(row).hexdigest() for row in rows}))
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> SyntheticDataset:
    return make_publishable(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def hub(tmp_path: Path):
    hub = start_hub(tmp_path / "hub", TOKENS)
    yield hub
    hub.stop()


def digests(dataset: SyntheticDataset) -> dict[str, str]:
    """Key -> SHA-256 over the arrays that the run had, in the order of their column names."""
    found = {}
    for key in dataset.keys:
        bits = dataset.bits(key)
        columns = {("" if name in ("input_ids", "loss_mask") else ".bf16").join((name, ".npy")): name for name in bits}
        arrays = [bits[columns[column]] for column in sorted(columns)]
        found[key] = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return found


def read_back(script: str, environment: dict[str, str]) -> dict[str, str]:
    command = [sys.executable, "-c", script, REPO]
    read = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr[-2000:]
    return json.loads(read.stdout.splitlines()[-1])


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_what_is_pushed_is_read_back_bit_for_bit_by_stock_readers(hub: HubServer, dataset, tmp_path, xet):
    environment = hub_environment(hub, tmp_path / "home", xet=xet)
    pushed = eaglehs("push", dataset.root, REPO, "--private", "--json", **environment)
    assert pushed.returncode == 0, pushed.stderr
    result = json.loads(pushed.stdout)
    assert result["revision"] == hub.refs(REPO)["main"]
    assert_whole(hub, dataset)
    assert (hub.body_bytes("/_xorb/") > 0, hub.body_bytes("/_lfs/put/") > 0) == (xet, not xet)
    assert WRITER not in pushed.stdout + pushed.stderr
    expected = digests(dataset)
    for number, script in enumerate((STOCK_READER, WEBDATASET_READER)):
        assert read_back(script, hub_environment(hub, tmp_path / f"fresh{number}", xet=xet)) == expected
    again = eaglehs("push", dataset.root, REPO, **environment)
    assert (again.returncode, "nothing was sent" in again.stderr) == (0, True)
    assert result["revision"] in again.stdout


def test_a_dry_run_shows_the_plan_and_changes_nothing(hub, dataset, tmp_path):
    environment = hub_environment(hub, tmp_path / "home", xet=True)
    shown = eaglehs("push", dataset.root, REPO, "--dry-run", **environment)
    assert shown.returncode == 0, shown.stderr
    for part in ("org/states (public, new), branch main, as alice", "4 in data", "to send     7 files"):
        assert part in shown.stdout
    facts = json.loads(eaglehs("push", dataset.root, REPO, "--dry-run", "--json", **environment).stdout)
    assert (facts["num_files"], facts["num_sent"], facts["folders"]["data"]) == (7, 7, 4)
    assert hub.state.load("datasets", REPO) is None


def finished(hub: HubServer, pattern: str) -> list[str]:
    """Return the paths of uploads that came in whole."""
    return [seen["path"] for seen in list(hub.log) if seen["path"].startswith(pattern) and seen["status"] == 200]


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_a_killed_push_sends_only_the_rest(hub: HubServer, dataset, tmp_path, xet):
    hub.bytes_per_s = 40_000
    environment = hub_environment(hub, tmp_path / "home", xet=xet)
    process = start_eaglehs("push", dataset.root, REPO, cwd=tmp_path, **environment)
    pattern = "/_xorb/" if xet else "/_lfs/put/"
    wait_until(lambda: hub.body_bytes(pattern) > 0, process)
    hub.faults.append({"path": "/commit/", "status": 503, "times": 10**9})  # it must not end before it is killed
    wait_until(lambda: finished(hub, pattern), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    hub.faults.clear()
    hub.bytes_per_s = 0
    hub.wait_until_idle()
    assert_not_visible(hub)
    done = finished(hub, pattern)
    hub.log.clear()
    again = eaglehs("push", dataset.root, REPO, **hub_environment(hub, tmp_path / "home2", xet=xet))
    assert again.returncode == 0, again.stderr
    assert_whole(hub, dataset)
    assert not {seen["path"] for seen in hub.log if seen["method"] in ("PUT", "POST")} & set(done)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"path": "xet-write-token", "status": 404, "times": 99}, "HF_HUB_DISABLE_XET=1"),
        ({"path": "xet-write-token", "status": 401, "times": 99}, "token from HF_TOKEN is wrong or has expired"),
        ({"path": "xorb", "status": 403, "times": 99}, "write rights in org, and room"),
        ({"path": "xorb", "status": 413, "times": 99}, "over the account's limit"),
        ({"path": "v1/shards", "status": 400, "times": 99}, "400"),
    ],
)
def test_a_refusal_inside_xet_says_what_to_do_and_a_rerun_ends_it(hub, dataset, tmp_path, fault, message):
    hub.faults.append(fault)
    environment = hub_environment(hub, tmp_path / "home", xet=True)
    refused = eaglehs("push", dataset.root, REPO, **environment)
    assert refused.returncode == 4, refused.stderr
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert WRITER not in refused.stderr
    assert_not_visible(hub)
    hub.faults.clear()
    assert eaglehs("push", dataset.root, REPO, **environment).returncode == 0
    assert_whole(hub, dataset)


@pytest.mark.parametrize(
    "fault", [{"path": "_xorb/", "after": 1000, "times": 1}, {"path": "xorb", "status": 503, "times": 2}]
)
def test_a_passing_fault_inside_xet_is_waited_out(hub, dataset, tmp_path, fault):
    hub.faults.append(fault)
    pushed = eaglehs("push", dataset.root, REPO, **hub_environment(hub, tmp_path / "home", xet=True))
    assert pushed.returncode == 0, pushed.stderr
    assert_whole(hub, dataset)


def test_files_of_an_earlier_layout_are_not_removed_unasked(hub, dataset, tmp_path):
    environment = hub_environment(hub, tmp_path / "home", xet=False)
    small = make_publishable(tmp_path / "small", lengths=(4, 9))
    assert eaglehs("push", dataset.root, REPO, **environment).returncode == 0
    refused = eaglehs("push", small.root, REPO, **environment)
    assert refused.returncode == 2
    assert "3 files of an earlier layout" in refused.stderr
    assert "to remove   data/train-00003.tar" in refused.stderr
    assert_whole(hub, dataset)
    assert eaglehs("push", small.root, REPO, "--yes", **environment).returncode == 0
    assert_whole(hub, small)


def read_until_quiet(terminal: int, wanted: bytes) -> bytes:
    """Return what comes until `wanted` has come and then half a second nothing; a bar draws ten times a second."""
    seen, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 65536)
        elif wanted in seen:
            return seen
    raise AssertionError(f"never quiet: {seen[-500:]!r}")


def test_on_a_terminal_the_question_stays_to_be_read_until_it_is_answered(hub, dataset, tmp_path):
    environment = hub_environment(hub, tmp_path / "home", xet=False)
    assert eaglehs("push", dataset.root, REPO, **environment).returncode == 0
    small = make_publishable(tmp_path / "small", lengths=(4, 9))
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [*ENTRY, "push", str(small.root), REPO],
        env={**os.environ, **environment, "TERM": "xterm", "COLUMNS": "120"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    seen = read_until_quiet(terminal, b"[y/N]")
    assert seen.endswith(b"Remove these 3 files from the Hub? [y/N]: ")
    os.write(terminal, b"n\n")
    assert b"nothing was sent" in read_until_quiet(terminal, b"nothing was sent")
    assert process.wait(20) == 2
    os.close(terminal)
    os.close(theirs)
    assert_whole(hub, dataset)


@pytest.mark.parametrize(
    ("token", "repo", "code", "message"),
    [
        (HOPELESS, REPO, 4, "token from HF_TOKEN is wrong or has expired"),
        ("", REPO, 4, "Set HF_TOKEN, or run: hf auth login"),
        (READER, REPO, 4, "may only read"),
        (WRITER, "elsewhere/states", 4, "it may write to alice, org"),
        (WRITER, "no-slash", 2, "Write it as org/name"),
    ],
)
def test_who_may_not_is_told_what_to_do_and_no_token_is_shown(hub, dataset, tmp_path, token, repo, code, message):
    environment = hub_environment(hub, tmp_path / "home", xet=True, token=token)
    refused = eaglehs("push", dataset.root, repo, **environment)
    assert refused.returncode == code, refused.stderr
    assert message in refused.stderr
    assert not any(secret and secret in refused.stdout + refused.stderr for secret in (token, READER, WRITER, HOPELESS))


def test_the_license_is_written_into_the_card_and_must_be_given(hub, dataset, tmp_path):
    bare = make_publishable(tmp_path / "bare", lengths=(4,))
    card = bare.folder.card
    card.write_text(card.read_text().replace("license: other\n", ""))
    environment = hub_environment(hub, tmp_path / "home", xet=False)
    refused = eaglehs("push", bare.root, REPO, **environment)
    assert (refused.returncode, "Give --license" in refused.stderr) == (2, True)
    assert eaglehs("push", bare.root, REPO, "--license", "cc-by-4.0", **environment).returncode == 0
    assert "license: cc-by-4.0\n" in card.read_text()


def test_the_license_that_is_given_stands_in_the_table_too_unless_the_card_was_changed_by_hand(hub, tmp_path):
    bare = make_publishable(tmp_path / "bare", lengths=(4,))
    card = write_card(bare.root)
    environment = hub_environment(hub, tmp_path / "home", xet=False)
    assert eaglehs("push", bare.root, REPO, "--license", "cc-by-4.0", "--dry-run", **environment).returncode == 0
    assert card.read_text().startswith("---\nlicense: cc-by-4.0\n")
    assert "| this dataset | cc-by-4.0 |" in card.read_text()
    card.write_text(card.read_text() + "My own words.\n")
    assert eaglehs("push", bare.root, REPO, "--license", "mit", "--dry-run", **environment).returncode == 0
    assert "license: mit\n" in card.read_text()
    assert "My own words." in card.read_text()


def test_another_license_takes_the_name_of_the_one_before_it_along(hub, tmp_path):
    bare = make_publishable(tmp_path / "bare", lengths=(4,))
    card = write_card(bare.root, CardTerms(license="other", license_name="acme", license_link="https://example.org"))
    environment = hub_environment(hub, tmp_path / "home", xet=False)
    assert eaglehs("push", bare.root, REPO, "--license", "mit", "--dry-run", **environment).returncode == 0
    assert "| this dataset | mit |" in card.read_text()
    assert not {"acme", "https://example.org"} & set(card.read_text().split())
    card.write_text(card.read_text() + "My own words.\n")
    named = ("--license", "other", "--license-name", "acme-2")
    assert eaglehs("push", bare.root, REPO, *named, "--dry-run", **environment).returncode == 0
    assert card.read_text().startswith("---\nlicense: other\nlicense_name: acme-2\npretty_name:")
    assert eaglehs("push", bare.root, REPO, "--license", "mit", "--dry-run", **environment).returncode == 0
    assert card.read_text().startswith("---\nlicense: mit\npretty_name:")


@pytest.mark.parametrize("by_hand", ["", "My own words.\n"])
@pytest.mark.parametrize(("license_id", "message"), [("mit-2", "is no license id"), ("other", "--license-name")])
def test_a_license_that_can_not_be_is_refused_and_leaves_the_card(hub, tmp_path, by_hand, license_id, message):
    bare = make_publishable(tmp_path / "bare", lengths=(4,))
    card = write_card(bare.root, CardTerms(license="cc-by-4.0"))
    card.write_text(card.read_text() + by_hand)
    before = card.read_text()
    environment = hub_environment(hub, tmp_path / "home", xet=False)
    refused = eaglehs("push", bare.root, REPO, "--license", license_id, **environment)
    assert (refused.returncode, message in refused.stderr, card.read_text() == before) == (2, True, True)
    assert hub.log == []
