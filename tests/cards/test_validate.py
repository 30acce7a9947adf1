"""A card that the Hub or `datasets` would not take is refused here, by name, before anything is sent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from eaglehs.cards.charts import CARD_CHARTS
from eaglehs.cards.licenses import CardTerms
from eaglehs.cards.validate import CardInvalidError, card_faults, validate_card
from eaglehs.cards.write import write_card
from huggingface_hub import DatasetCard

from tests.factories.datasets import SyntheticDataset, make_dataset


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_dataset(tmp_path_factory.mktemp("validate"))


@pytest.fixture
def dataset(packed: SyntheticDataset) -> SyntheticDataset:
    write_card(packed.root, CardTerms(license="cc-by-4.0"))
    return packed


def change_head(dataset: SyntheticDataset, change: Callable[[dict], object]) -> None:
    _, head, body = dataset.folder.card.read_text().split("---\n", 2)
    fields = yaml.safe_load(head)
    change(fields)
    dataset.folder.card.write_text(f"---\n{yaml.safe_dump(fields)}---\n{body}")


def test_a_card_with_a_license_is_fit_and_the_hubs_library_reads_the_same(dataset: SyntheticDataset):
    assert card_faults(dataset.root) == ()
    validate_card(dataset.root)
    data = DatasetCard(dataset.folder.card.read_text()).data
    assert data.license == "cc-by-4.0"
    assert data.size_categories == ["n<1K"]
    assert data.configs[0]["config_name"] == "default"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: head.pop("license"), "names no license"),
        (lambda head: head.update(license="my own"), "'my own' is no license id"),
        (lambda head: head.update(license=["mit"]), "is no license id"),
        (lambda head: head.update(tags="eagle"), "`tags` is not a list of words"),
        (lambda head: head.update(size_categories=["huge"]), "are not the Hub's"),
        (lambda head: head.update(pretty_name=3), "`pretty_name` is no text"),
        (lambda head: head.pop("configs"), "does not say which files"),
        (lambda head: head.update(configs=[]), "does not say which files"),
        (lambda head: head["configs"].append(dict(head["configs"][0])), "'default' stands twice"),
        (lambda head: head["configs"][0].update(config_name="a/b"), "can't be a name"),
        (
            lambda head: head["configs"].append({"config_name": "x", "data_files": "/etc/x.tar"}),
            "not tars of this repository",
        ),
        (lambda head: head["configs"].append({"config_name": "x", "data_files": "a/*.parquet"}), "not tars"),
        (lambda head: head["configs"].append({"config_name": "x", "data_files": "a/*.tar"}), "no file matches"),
        (lambda head: head["configs"][0].update(data_files="*.tar"), "the first config does not read"),
        (lambda head: head.pop("dataset_info"), "has no features"),
        (lambda head: head["dataset_info"]["features"].pop(), "__url__ is not declared"),
        (
            lambda head: head["dataset_info"]["features"].append({"name": "x", "dtype": "no such"}),
            "can't read the features",
        ),
        (
            lambda head: head["dataset_info"]["features"].append({"name": "__key__", "dtype": "string"}),
            "__key__ stands twice",
        ),
    ],
)
def test_each_fault_of_the_front_matter_is_named(dataset: SyntheticDataset, change, message: str):
    change_head(dataset, change)
    faults = card_faults(dataset.root)
    assert any(message in fault for fault in faults), faults
    with pytest.raises(CardInvalidError) as caught:
        validate_card(dataset.root)
    assert caught.value.faults == faults
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# a title\n", "does not begin with YAML"),
        ("---\na: b\n", "does not begin with YAML"),
        ("---\na: [\n---\n", "is no YAML"),
        ("---\n- a\n---\n", "is a list"),
        ("---\nlicense: mit\nlicense: other\n---\n", "the key 'license' stands twice"),
    ],
)
def test_a_head_that_is_none_is_named(dataset: SyntheticDataset, text: str, message: str):
    dataset.folder.card.write_text(text)
    assert any(message in fault for fault in card_faults(dataset.root))


def test_a_missing_card_is_a_fault(tmp_path: Path):
    assert card_faults(tmp_path) == ("can't be read: No such file or directory",)


def test_an_image_that_is_not_there_is_named(dataset: SyntheticDataset):
    card = dataset.folder.card
    images = "".join(f'<img src="plots/{name}.png">\n' for name in CARD_CHARTS)
    card.write_text(card.read_text() + images + "![far](https://example.org/x.png)\n")
    assert len(card_faults(dataset.root)) == len(CARD_CHARTS)
    assert "shows the image plots/lengths.png, which is not there" in card_faults(dataset.root)
