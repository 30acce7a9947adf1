"""`eaglehs card` writes the file and prints its path."""

import json
from pathlib import Path

import pytest
from eaglehs.schemas.codec import write_record

from eaglehs.commands.card import card
from tests.factories.manifests import make_manifest


def test_the_path_of_the_card_is_the_one_line_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_record(tmp_path / "manifest.json", make_manifest())
    card(tmp_path)
    assert capsys.readouterr().out == f"{tmp_path / 'README.md'}\n"
    assert (tmp_path / "README.md").is_file()


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_record(tmp_path / "manifest.json", make_manifest())
    card(tmp_path, json=True)
    assert json.loads(capsys.readouterr().out) == {"card": str(tmp_path / "README.md")}
