"""README.md appears whole, from manifest.json alone."""

from pathlib import Path

import pytest
from eaglehs.cards.render import render_card
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.errors import RecordError, UsageError
from eaglehs.schemas.verified import manifest_sha256, verified_path

from tests.factories.manifests import make_manifest
from tests.factories.statistics import make_verified


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


def test_a_verification_is_told_only_of_its_own_manifest_and_only_without_faults(tmp_path: Path):
    write_record(tmp_path / "manifest.json", make_manifest())
    (tmp_path / "_index").mkdir()
    own = manifest_sha256(tmp_path / "manifest.json")
    for record, is_told in (
        (make_verified(manifest_sha256=own), True),
        (make_verified(), False),
        (make_verified(manifest_sha256=own, faults=("layer_3 is another layer",)), False),
    ):
        write_record(verified_path(tmp_path), record)
        assert ("**Computed again**" in write_card(tmp_path).read_text()) == is_told
