"""Every code block of the card runs as it stands, on the dataset that it describes."""

import re
from pathlib import Path

import numpy as np
import pytest
from eaglehs.builder.preview import PreviewSettings, write_preview
from eaglehs.cards.render import render_card
from eaglehs.cards.validate import card_faults
from eaglehs.cards.write import write_card
from eaglehs.schemas.states import Codec

from tests.factories.bits import bits_of
from tests.factories.coded import make_coded
from tests.factories.datasets import SyntheticDataset
from tests.factories.manifests import make_manifest
from tests.factories.readable import make_readable
from tests.factories.statistics import make_extras

CODE_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = [
    (codec, number)
    for codec in Codec
    for number in range(len(CODE_BLOCK.findall(render_card(make_manifest(codec=codec), make_extras()))))
]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[Codec, SyntheticDataset]:
    made = {
        Codec.PLAIN: make_readable(tmp_path_factory.mktemp("usage")),
        Codec.PLANES_ZSTD: make_coded(tmp_path_factory.mktemp("coded")),
    }
    for dataset in made.values():
        write_preview(dataset.root, PreviewSettings(num_samples=2))
        write_card(dataset.root)
    return made


@pytest.fixture(scope="module")
def dataset(datasets: dict[Codec, SyntheticDataset]) -> SyntheticDataset:
    return datasets[Codec.PLAIN]


@pytest.mark.parametrize(("codec", "number"), BLOCKS)
def test_a_code_block_of_the_card_runs(
    datasets: dict[Codec, SyntheticDataset], codec: Codec, number: int, capsys: pytest.CaptureFixture[str]
):
    dataset = datasets[codec]
    code = CODE_BLOCK.findall(dataset.folder.card.read_text(encoding="utf-8"))[number]
    code = code.replace("org/name", str(dataset.root)).replace("path/to/dataset", str(dataset.root))
    names: dict[str, object] = {}
    exec(compile(code, f"block {number} of the card", "exec"), names)
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


def test_the_card_shows_all_three_ways(dataset: SyntheticDataset):
    card = dataset.folder.card.read_text(encoding="utf-8")
    for way in ('load_dataset("org/name", split="train", streaming=True)', "webdataset.WebDataset(", "eaglehs.stream("):
        assert way in card


def test_nothing_of_the_machine_that_packed_is_in_the_card(dataset: SyntheticDataset):
    card = dataset.folder.card.read_text(encoding="utf-8")
    assert str(Path.home()) not in card
    assert str(dataset.root) not in card
