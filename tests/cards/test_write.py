"""README.md appears whole, from manifest.json alone."""

from pathlib import Path

import pytest
from eaglehs.cards.render import render_card
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.errors import RecordError, UsageError

from tests.factories.manifests import make_manifest


def test_the_card_is_written_beside_the_manifest(tmp_path: Path):
    write_record(tmp_path / "manifest.json", make_manifest())
    assert write_card(tmp_path) == tmp_path / "README.md"
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == render_card(make_manifest())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "manifest.json"]


def test_a_second_card_keeps_the_publishers_license(tmp_path: Path):
    write_record(tmp_path / "manifest.json", make_manifest())
    card = write_card(tmp_path)
    card.write_text(card.read_text().replace("---\n", "---\nlicense: mit\n", 1) + "\nnotes of the publisher\n")
    text = write_card(tmp_path).read_text()
    assert text.startswith("---\nlicense: mit\n")
    assert "notes of the publisher" not in text


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no manifest\.json"):
        write_card(tmp_path)


def test_a_cut_manifest_leaves_the_old_card(tmp_path: Path):
    write_record(tmp_path / "manifest.json", make_manifest())
    old = write_card(tmp_path).read_text()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    with pytest.raises(RecordError, match="not valid JSON"):
        write_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == old
