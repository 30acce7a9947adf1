"""Every code block of the card runs as it stands, on the dataset that it describes."""

import re
from pathlib import Path

import pytest
from eaglehs.builder.preview import PreviewSettings, write_preview
from eaglehs.cards.render import render_card
from eaglehs.cards.write import write_card

from tests.factories.datasets import SyntheticDataset
from tests.factories.manifests import make_manifest
from tests.factories.readable import make_readable
from tests.factories.statistics import make_extras

CODE_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
NUM_BLOCKS = len(CODE_BLOCK.findall(render_card(make_manifest(), make_extras())))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    dataset = make_readable(tmp_path_factory.mktemp("usage"))
    write_preview(dataset.root, PreviewSettings(num_samples=2))
    write_card(dataset.root)
    return dataset


@pytest.mark.parametrize("number", range(NUM_BLOCKS))
def test_a_code_block_of_the_card_runs(dataset: SyntheticDataset, number: int, capsys: pytest.CaptureFixture[str]):
    code = CODE_BLOCK.findall(dataset.folder.card.read_text(encoding="utf-8"))[number]
    code = code.replace("org/name", str(dataset.root)).replace("path/to/dataset", str(dataset.root))
    names: dict[str, object] = {}
    exec(compile(code, f"block {number} of the card", "exec"), names)
    assert str(dataset.root) in code
    assert any(name in names for name in ("final", "batch", "sample"))


def test_the_card_shows_all_three_ways(dataset: SyntheticDataset):
    card = dataset.folder.card.read_text(encoding="utf-8")
    for way in ('load_dataset("org/name", split="train", streaming=True)', "webdataset.WebDataset(", "eaglehs.stream("):
        assert way in card


def test_nothing_of_the_machine_that_packed_is_in_the_card(dataset: SyntheticDataset):
    card = dataset.folder.card.read_text(encoding="utf-8")
    assert str(Path.home()) not in card
    assert str(dataset.root) not in card
