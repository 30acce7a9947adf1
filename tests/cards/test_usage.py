"""Every code block of the card runs as it stands: on the Hub from an empty cache, and on a local folder."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from eaglehs.builder.preview import PreviewSettings, write_preview
from eaglehs.cards.licenses import CardTerms
from eaglehs.cards.render import render_card
from eaglehs.cards.validate import card_faults
from eaglehs.cards.write import write_card
from eaglehs.schemas.states import Codec

from tests.factories.bits import bits_of
from tests.factories.coded import make_coded
from tests.factories.datasets import SyntheticDataset
from tests.factories.manifests import make_manifest
from tests.factories.published import REPO, TOKENS, WRITER, Pusher, by_lfs, hub_environment
from tests.factories.readable import make_readable
from tests.factories.statistics import make_extras
from tests.fakes.hub import HubServer, start_hub

CODE_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = {
    Codec.PLAIN: ("datasets", "batches", "webdataset", "stream", "preview"),
    Codec.PLANES_ZSTD: ("datasets", "datasets alone", "batches", "webdataset decoded", "stream", "preview"),
}
ALL = [(codec, name) for codec in Codec for name in BLOCKS[codec]]

SHOWN = """
import hashlib, torch
bits = lambda tensor: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
"""
TELL = {
    "datasets": 'print(row["__key__"], bits(final))',
    "datasets alone": 'print(row["__key__"], bits(final))',
    "batches": 'print(batch["key"][0], bits(batch["final"][0, batch["attention_mask"][0].bool()]))',
    "webdataset": 'print(sample["__key__"], bits(final))',
    "webdataset decoded": 'print(row["__key__"], bits(sample["final"]))',
    "stream": 'print(sample["key"], bits(sample["final"]))',
    "preview": 'print(sample["__key__"], bits(torch.tensor(sample["input_ids.json"], dtype=torch.int32)))',
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[Codec, SyntheticDataset]:
    made = {
        Codec.PLAIN: make_readable(tmp_path_factory.mktemp("usage")),
        Codec.PLANES_ZSTD: make_coded(tmp_path_factory.mktemp("coded")),
    }
    for dataset in made.values():
        write_preview(dataset.root, PreviewSettings(num_samples=2))
        write_card(dataset.root, CardTerms(license="mit"))
    return made


@pytest.fixture(scope="module")
def dataset(datasets: dict[Codec, SyntheticDataset]) -> SyntheticDataset:
    return datasets[Codec.PLAIN]


@pytest.fixture(scope="module")
def hub(datasets: dict[Codec, SyntheticDataset], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A Hub that has the plain dataset in a public and in a private repository, and the coded one in a public one."""
    hub = start_hub(tmp_path_factory.mktemp("hub"), TOKENS)
    plain, coded = (datasets[codec].root for codec in (Codec.PLAIN, Codec.PLANES_ZSTD))
    with by_lfs():
        for pusher, is_private in (
            (Pusher(hub, plain), False),
            (Pusher(hub, plain, repo="org/own"), True),
            (Pusher(hub, coded, repo="org/coded"), False),
        ):
            pusher.client.create(private=is_private)
            pusher.push()
    yield hub
    hub.stop()


def block_of(dataset: SyntheticDataset, codec: Codec, name: str) -> str:
    return CODE_BLOCK.findall(dataset.folder.card.read_text(encoding="utf-8"))[BLOCKS[codec].index(name)]


def digest_of(dataset: SyntheticDataset, key: str, array: str) -> str:
    return hashlib.sha256(dataset.bits(key)[array].tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("codec", "name", "repo", "token"),
    [
        *[(Codec.PLAIN, name, REPO, "") for name in BLOCKS[Codec.PLAIN]],
        *[(Codec.PLAIN, name, "org/own", WRITER) for name in BLOCKS[Codec.PLAIN]],
        *[(Codec.PLANES_ZSTD, name, "org/coded", "") for name in BLOCKS[Codec.PLANES_ZSTD]],
    ],
)
def test_a_code_block_of_the_card_streams_the_packed_bits_from_the_hub(
    datasets, hub, tmp_path, codec, name, repo, token
):
    dataset = datasets[codec]
    code = block_of(dataset, codec, name).replace("org/name", repo)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= hub_environment(hub, tmp_path / "home", xet=False, token=token)
    command = [sys.executable, "-c", code + SHOWN + TELL[name]]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    key, digest = run.stdout.split("\n")[-2].split()
    assert digest == digest_of(dataset, key, "input_ids" if name == "preview" else "final")


@pytest.mark.parametrize(("codec", "name"), [(codec, name) for codec, name in ALL if "webdataset" not in name])
def test_a_code_block_of_the_card_runs_on_a_local_folder(
    datasets: dict[Codec, SyntheticDataset], codec: Codec, name: str
):
    dataset = datasets[codec]
    names: dict[str, object] = {}
    code = block_of(dataset, codec, name).replace("org/name", str(dataset.root))
    exec(compile(code, f"block {name} of the card", "exec"), names)
    assert str(dataset.root) in code
    assert any(name in names for name in ("final", "batch", "sample"))
    if "final" in names:  # of the first sample, whichever way it was read
        np.testing.assert_array_equal(bits_of(names["final"]), dataset.bits(dataset.keys[0])["final"])


def test_the_card_of_a_coded_dataset_says_what_a_stock_reader_needs(datasets: dict[Codec, SyntheticDataset]):
    card, plain = (datasets[codec].folder.card.read_text() for codec in (Codec.PLANES_ZSTD, Codec.PLAIN))
    for text in ("`planes-zstd`", "eaglehs.decode", "the package `zstandard`", "| `final.bf16.planes` | bytes"):
        assert text in card
        assert text not in plain
    assert ".bf16.npy" not in card
    assert card_faults(datasets[Codec.PLANES_ZSTD].root) == card_faults(datasets[Codec.PLAIN].root)


def test_the_card_shows_all_three_ways_and_no_block_besides_those_that_are_run():
    card = render_card(make_manifest(), make_extras())
    assert len(CODE_BLOCK.findall(card)) == len(BLOCKS[Codec.PLAIN])
    coded = render_card(make_manifest(codec=Codec.PLANES_ZSTD), make_extras())
    assert len(CODE_BLOCK.findall(coded)) == len(BLOCKS[Codec.PLANES_ZSTD])
    for way in ('load_dataset("org/name", split="train", streaming=True)', "webdataset.WebDataset(", "eaglehs.stream("):
        assert way in card


def test_nothing_of_the_machine_that_packed_is_in_the_card(dataset: SyntheticDataset):
    card = dataset.folder.card.read_text(encoding="utf-8")
    assert str(Path.home()) not in card
    assert str(dataset.root) not in card
