"""Every code block of the card runs as it stands: on the Hub from an empty cache, and on a local folder."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from eaglehs.builder.preview import PreviewSettings, write_preview
from eaglehs.cards.licenses import CardTerms
from eaglehs.cards.render import render_card
from eaglehs.cards.write import write_card

from tests.factories.datasets import SyntheticDataset
from tests.factories.manifests import make_manifest
from tests.factories.published import REPO, TOKENS, WRITER, Pusher, by_lfs, hub_environment
from tests.factories.readable import make_readable
from tests.factories.statistics import make_extras
from tests.fakes.hub import HubServer, start_hub

CODE_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = ("datasets", "batches", "webdataset", "stream", "preview")

SHOWN = """
import hashlib, torch
bits = lambda tensor: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
"""
TELL = {
    "datasets": 'print(row["__key__"], bits(final))',
    "batches": 'print(batch["key"][0], bits(batch["final"][0, batch["attention_mask"][0].bool()]))',
    "webdataset": 'print(sample["__key__"], bits(final))',
    "stream": 'print(sample["key"], bits(sample["final"]))',
    "preview": 'print(sample["__key__"], bits(torch.tensor(sample["input_ids.json"], dtype=torch.int32)))',
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    dataset = make_readable(tmp_path_factory.mktemp("usage"))
    write_preview(dataset.root, PreviewSettings(num_samples=2))
    write_card(dataset.root, CardTerms(license="mit"))
    return dataset


@pytest.fixture(scope="module")
def hub(dataset: SyntheticDataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A Hub that has the dataset, in a public and in a private repository."""
    hub = start_hub(tmp_path_factory.mktemp("hub"), TOKENS)
    with by_lfs():
        for pusher, is_private in (
            (Pusher(hub, dataset.root), False),
            (Pusher(hub, dataset.root, repo="org/own"), True),
        ):
            pusher.client.create(private=is_private)
            pusher.push()
    yield hub
    hub.stop()


def block_of(dataset: SyntheticDataset, name: str) -> str:
    return CODE_BLOCK.findall(dataset.folder.card.read_text(encoding="utf-8"))[BLOCKS.index(name)]


def digest_of(dataset: SyntheticDataset, key: str, array: str) -> str:
    return hashlib.sha256(dataset.bits(key)[array].tobytes()).hexdigest()


@pytest.mark.parametrize(("repo", "token"), [(REPO, ""), ("org/own", WRITER)], ids=["public", "private"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_code_block_of_the_card_streams_the_packed_bits_from_the_hub(dataset, hub, tmp_path, name, repo, token):
    code = block_of(dataset, name).replace("org/name", repo)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= hub_environment(hub, tmp_path / "home", xet=False, token=token)
    command = [sys.executable, "-c", code + SHOWN + TELL[name]]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    key, digest = run.stdout.split("\n")[-2].split()
    assert digest == digest_of(dataset, key, "input_ids" if name == "preview" else "final")


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "webdataset"])
def test_a_code_block_of_the_card_runs_on_a_local_folder(dataset: SyntheticDataset, name: str):
    names: dict[str, object] = {}
    code = block_of(dataset, name).replace("org/name", str(dataset.root))
    exec(compile(code, f"block {name} of the card", "exec"), names)
    assert str(dataset.root) in code
    assert any(name in names for name in ("final", "batch", "sample"))


def test_the_card_shows_all_three_ways_and_no_block_besides_those_that_are_run():
    card = render_card(make_manifest(), make_extras())
    assert len(CODE_BLOCK.findall(card)) == len(BLOCKS)
    for way in ('load_dataset("org/name", split="train", streaming=True)', "webdataset.WebDataset(", "eaglehs.stream("):
        assert way in card


def test_nothing_of_the_machine_that_packed_is_in_the_card(dataset: SyntheticDataset):
    card = dataset.folder.card.read_text(encoding="utf-8")
    assert str(Path.home()) not in card
    assert str(dataset.root) not in card
