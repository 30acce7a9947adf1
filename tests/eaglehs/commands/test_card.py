"""`eaglehs card` writes the file and prints its path; terms and preview come by its flags."""

import json
from pathlib import Path

import pytest
from datasets import load_dataset
from eaglehs.builder.verify import verify_dataset
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.errors import UsageError

from eaglehs.commands.card import card
from eaglehs.commands.report import report
from tests.eaglehs.cli import NOTHING_TYPED
from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.manifests import make_manifest
from tests.factories.tokenizers import fast_tokenizer, save_model_folder


@pytest.fixture
def dataset(tmp_path: Path) -> SyntheticDataset:
    return make_dataset(tmp_path)


def test_the_path_of_the_card_is_the_one_line_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_record(tmp_path / "manifest.json", make_manifest())
    card(NOTHING_TYPED, tmp_path)
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'README.md'}\n"
    assert "before it can be published: names no license" in printed.err
    assert (tmp_path / "README.md").is_file()


def test_json_is_one_document_with_what_is_still_missing(dataset: SyntheticDataset, capsys: pytest.CaptureFixture[str]):
    card(NOTHING_TYPED, dataset.root, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["card"] == str(dataset.root / "README.md")
    assert [fault[:16] for fault in found["faults"]] == ["names no license"]


def test_terms_make_the_card_fit_to_publish_and_stay(dataset: SyntheticDataset, capsys: pytest.CaptureFixture[str]):
    card(
        NOTHING_TYPED,
        dataset.root,
        license_id="other",
        license_name="acme",
        model_terms="Modified MIT",
        prompts_terms="cc0-1.0",
    )
    card(NOTHING_TYPED, dataset.root)
    assert "before it can be published" not in capsys.readouterr().err
    text = (dataset.root / "README.md").read_text()
    assert "license: other\nlicense_name: acme\n" in text
    assert "| this dataset | acme |" in text
    assert "which computed the states | Modified MIT |" in text
    assert "can be read from the ids | cc0-1.0 |" in text


def test_a_license_that_the_hub_does_not_know_leaves_the_old_card(dataset: SyntheticDataset):
    card(NOTHING_TYPED, dataset.root, license_id="mit")
    before = (dataset.root / "README.md").read_text()
    with pytest.raises(UsageError, match="'MIT license' is no license id"):
        card(NOTHING_TYPED, dataset.root, license_id="MIT license")
    assert (dataset.root / "README.md").read_text() == before


def test_a_preview_with_text_is_loaded_by_name_and_taken_away_again(dataset: SyntheticDataset, tmp_path: Path):
    tokenizer = fast_tokenizer()
    model = save_model_folder(tmp_path / "model", tokenizer)
    card(NOTHING_TYPED, dataset.root, license_id="mit", preview=2, tokenizer=str(model))
    rows = list(load_dataset(str(dataset.root), "preview", split="train", streaming=True))
    assert [row["text.txt"] for row in rows] == [tokenizer.decode(row["input_ids.json"]) for row in rows]
    assert verify_dataset(dataset.root).faults == ()
    card(NOTHING_TYPED, dataset.root)
    assert "config_name: preview" in (dataset.root / "README.md").read_text()
    card(NOTHING_TYPED, dataset.root, preview=0)
    assert "preview" not in (dataset.root / "README.md").read_text()
    assert not (dataset.root / "preview").exists()


def test_a_tokenizer_without_a_preview_is_refused(dataset: SyntheticDataset):
    with pytest.raises(UsageError, match="without --preview N has no effect"):
        card(NOTHING_TYPED, dataset.root, tokenizer="x")


def test_the_reports_charts_are_on_the_next_card_and_not_on_that_of_another_packing(
    dataset: SyntheticDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report(NOTHING_TYPED, dataset.root)
    card(NOTHING_TYPED, dataset.root, license_id="mit")
    assert "before it can be published" not in capsys.readouterr().err
    assert '<img src="plots/lengths.png"' in (dataset.root / "README.md").read_text()
    other = make_dataset(tmp_path / "other", lengths=(3, 4))
    (dataset.root / "plots").rename(other.root / "plots")
    card(NOTHING_TYPED, other.root)
    assert "<img" not in (other.root / "README.md").read_text()
