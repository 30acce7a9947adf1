"""`eaglehs.stream("org/name")`: ranges of the Hub's own addresses, one commit, the token where it belongs.

The reader is a process of its own, as huggingface_hub takes HF_ENDPOINT when it is imported.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from eaglehs.builder.stream import stream
from huggingface_hub import HfApi

from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import make_readable
from tests.fakes.hub import HubServer, start_hub

READ = """
import json, sys, warnings, xxhash, torch, eaglehs
from eaglehs.schemas.errors import EaglehsError
warnings.showwarning = lambda message, *more: print(f"warning: {message}")
try:
    samples = eaglehs.stream(sys.argv[1], **json.loads(sys.argv[2]))
    for sample in samples:
        bits = b"".join(v.view(torch.uint8).numpy().tobytes() for v in sample.values() if isinstance(v, torch.Tensor))
        print(sample["key"], xxhash.xxh3_128_hexdigest(bits))
except EaglehsError as fault:
    print(f"{type(fault).__name__}: {fault}")
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("hub-dataset"))


@pytest.fixture
def hub(dataset: SyntheticDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    hub = start_hub(tmp_path / "hub")
    api = HfApi(endpoint=hub.url, token="hf_w")
    api.create_repo("org/name", repo_type="dataset", private=True)
    api.upload_folder(repo_id="org/name", repo_type="dataset", folder_path=dataset.root)
    hub.log.clear()
    yield hub
    hub.stop()


def read(hub: HubServer, tmp_path: Path, source: str = "org/name", token: str = "hf_w", **options: object) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    if token:
        environment["HF_TOKEN"] = token
    done = subprocess.run(
        [sys.executable, "-c", READ, source, json.dumps(options)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def expected(dataset: SyntheticDataset, **options: object) -> list[str]:
    lines = []
    for sample in stream(dataset.root, **options):
        arrays = [value for value in sample.values() if isinstance(value, torch.Tensor)]
        bits = b"".join(array.view(torch.uint8).numpy().tobytes() for array in arrays)
        lines.append(f"{sample['key']} {xxhash.xxh3_128_hexdigest(bits)}")
    return lines


def test_a_private_repository_gives_the_folders_samples_through_ranges(dataset, hub: HubServer, tmp_path: Path):
    assert read(hub, tmp_path, shuffle_seed=1) == expected(dataset, shuffle_seed=1)
    paths = [seen["path"] for seen in hub.log]
    commit = hub.refs("org/name")["main"]
    resolved = [path for path in paths if "/resolve/" in path]
    assert resolved
    assert all(f"/resolve/{commit}/" in path for path in resolved)
    shards = [path for path in resolved if ".tar" in path]
    assert len(shards) < 4 * 16 + 8  # where a shard is kept is asked for now and then, not for each range


def test_a_url_with_a_revision_names_the_same_repository(dataset: SyntheticDataset, hub: HubServer, tmp_path: Path):
    assert read(hub, tmp_path, "hf://datasets/org/name@main") == expected(dataset)


def test_a_connection_that_breaks_and_a_server_that_is_busy_change_nothing(dataset, hub: HubServer, tmp_path: Path):
    hub.faults.append({"path": r"/_cdn/|/cdn/", "after_out": 100, "times": 3})
    hub.faults.append({"path": r"/resolve/.*tar", "status": 503, "times": 2})
    hub.faults.append({"path": r"/resolve/.*tar", "status": 429, "times": 1, "headers": {"Retry-After": "0"}})
    assert read(hub, tmp_path) == expected(dataset)


def test_a_revision_whose_manifest_is_not_that_of_main_any_more_is_read_with_a_warning(dataset, hub, tmp_path: Path):
    pinned = hub.refs("org/name")["main"]
    assert read(hub, tmp_path, revision=pinned) == expected(dataset)
    other = make_readable(tmp_path / "other", lengths=(5, 6, 7))
    api = HfApi(endpoint=hub.url, token="hf_w")
    api.upload_file(repo_id="org/name", repo_type="dataset", path_or_fileobj=b"words", path_in_repo="notes.txt")
    assert read(hub, tmp_path, revision=pinned) == expected(dataset)  # main has moved, the dataset has not
    api.upload_folder(repo_id="org/name", repo_type="dataset", folder_path=other.root)
    warning, *samples = read(hub, tmp_path, revision=pinned)
    newest = hub.refs("org/name")["main"]
    assert warning.startswith(f"warning: org/name was published anew since {pinned[:12]}: main is {newest[:12]}")
    assert samples == expected(dataset)
    assert read(hub, tmp_path, revision="main") == read(hub, tmp_path) == expected(other)
    hub.faults.append({"path": "paths-info", "status": 403})
    assert read(hub, tmp_path, revision=pinned) == expected(dataset)  # what can't be asked is no reason to stop


@pytest.mark.parametrize(
    ("source", "token", "options", "message"),
    [
        ("org/other", "hf_w", {}, r"MissingRepositoryError: opening org/other on the Hub failed.*HF_TOKEN"),
        ("org/name", "", {}, r"MissingRepositoryError: opening org/name on the Hub failed.*HF_TOKEN"),
        ("org/name", "hf_w", {"revision": "v9"}, r"MissingRevisionError: opening org/name at v9.*no such branch"),
    ],
)
def test_what_can_not_be_had_says_why(hub: HubServer, tmp_path: Path, source, token, options, message):
    (line,) = read(hub, tmp_path, source, token, **options)
    assert re.match(message, line)
    assert "hf_w" not in line
