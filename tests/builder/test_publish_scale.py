"""The reference run, 500 shards of 2 GB, is planned in seconds and in little memory, and a shard is sent in little."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from eaglehs.builder.publish_card import set_license

from tests.factories.published import REPO, TOKENS, hub_environment
from tests.factories.sparse import make_sparse_dataset
from tests.fakes.hub import start_hub

PLAN = """
import json, sys, time
from pathlib import Path
began = time.process_time()
from eaglehs.builder.hub_client import HubClient
from eaglehs.builder.publish_plan import PublishSettings, plan_facts, plan_publish
from eaglehs.schemas.progress import Silent
hub, settings, loaded = HubClient(sys.argv[2]), PublishSettings(), time.process_time()
plan = plan_publish(Path(sys.argv[1]), hub, settings, Silent())
ended, facts = time.process_time(), plan_facts(plan, hub, settings)
lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would count the parent's before the exec
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
print(json.dumps([facts.num_sent, facts.sent_bytes, ended - loaded, loaded - began, peak]))
"""

SEND = """
import sys
from pathlib import Path
from eaglehs.builder.hub_client import HubClient
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
hub = HubClient(sys.argv[2])
hub.create(private=False)
before = peak()
hub.send(Path(sys.argv[1]), "data/train-00000.tar", "main")
print(peak() - before)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_a_shard_is_sent_in_far_less_memory_than_its_bytes(tmp_path: Path, xet: bool):
    shard = tmp_path / "shard.tar"
    with shard.open("wb") as file:
        file.truncate(600_000_000)
    hub = start_hub(tmp_path / "hub", TOKENS)
    environment = hub_environment(hub, tmp_path / "home", xet=xet)
    command = [sys.executable, "-c", SEND, str(shard), REPO]
    sent = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    hub.stop()
    assert sent.returncode == 0, sent.stderr[-2000:]
    assert int(sent.stdout) < 300_000_000


@pytest.mark.timeout(300)
def test_500_shards_of_2_gb_are_planned_in_5_seconds_and_300_mb(tmp_path: Path):
    folder = make_sparse_dataset(
        tmp_path / "dataset", num_samples=10_000, num_tokens=1730, shard_size_bytes=2_000_000_000
    )
    set_license(folder.card, "other")
    hub = start_hub(tmp_path / "hub", TOKENS)
    command = [sys.executable, "-c", PLAN, str(folder.root), REPO]
    environment = hub_environment(hub, tmp_path / "home", xet=True)
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    hub.stop()
    assert made.returncode == 0, made.stderr[-2000:]
    num_sent, sent_bytes, plan_s, import_s, peak_bytes = json.loads(made.stdout)
    print(f"plan {plan_s:.1f} s and {import_s:.1f} s of imports on one core, peak {peak_bytes / 1e6:.0f} MB")  # noqa: T201
    assert (num_sent, sent_bytes > 990_000_000_000) == (503, True)
    assert plan_s < 5  # of processor time: wall time says more about what else the machine does
    assert peak_bytes < 300_000_000
