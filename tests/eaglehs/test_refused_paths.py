"""Paths that the system refuses end every command with words and an exit code, whichever line touched them first."""

import errno
import sys
from pathlib import Path

import pytest
from eaglehs.builder.index_store import read_index
from eaglehs.builder.prompt_table import PromptTable
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.errors import RecordError
from eaglehs.schemas.manifest import Manifest

from eaglehs.main import run
from eaglehs.preflight import nearest_folder
from eaglehs.refused_paths import refused_path

LONG = "n" * 300


@pytest.fixture
def looped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", LONG),
        ("inspect", LONG),
        ("card", LONG),
        ("report", LONG),
        ("pack", LONG),
        ("push", LONG, "org/name", "--license", "mit"),
        ("extract", "--model", LONG, "--prompts", "p.jsonl"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_is_too_long_is_told_without_a_traceback(arguments, looped, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eaglehs", *arguments])
    message, exit_code = run()
    assert exit_code == 4
    assert "File name too long" in message
    assert message.startswith("error: nnn")


@pytest.mark.parametrize("command", ["verify", "inspect", "pack"])
def test_a_file_in_place_of_a_folder_is_called_a_file(command, looped, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eaglehs", command, "file"])
    message, exit_code = run()
    assert exit_code == 2
    assert message.startswith("error: file is a file, not a folder")


def test_doctor_looks_at_the_nearest_folder_that_it_can_see(looped):
    assert nearest_folder(looped / LONG / "run") == looped
    assert nearest_folder(looped / "file" / "run") == looped


def test_a_refusal_tells_the_path_the_reason_and_a_way_out():
    fault = PermissionError(errno.EACCES, "Permission denied", "theirs/run.json")
    told = refused_path(fault)
    assert str(told) == (
        "theirs/run.json: Permission denied. Look at the rights of it and of the folders above it: namei -l."
    )
    told = refused_path(OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000))
    assert str(told) == f"{'x' * 200}... (5,000 characters): File name too long. Give a shorter name."


@pytest.mark.parametrize(
    "fault",
    [FileNotFoundError(errno.ENOENT, "No such file", "a"), BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError("odd")],
    ids=["missing", "pipe", "odd"],
)
def test_what_is_no_refusal_of_a_path_stays_a_bug(fault: OSError):
    assert refused_path(fault) is None


@pytest.mark.parametrize(
    "read",
    [
        lambda path: PromptTable(path, vocab_size=8),
        lambda path: list(read_index(path)),
        lambda path: read_record(Manifest, path),
    ],
    ids=["prompts", "index", "manifest"],
)
def test_a_file_without_the_right_to_read_is_not_called_damaged(read, tmp_path, monkeypatch):
    """The system's answer is put in by hand: root may read everything."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    monkeypatch.setattr("pyarrow.parquet.read_schema", refuse)
    monkeypatch.setattr("pyarrow.parquet.read_metadata", refuse)
    with pytest.raises(RecordError, match=r"can't be read: Permission denied. Look at its rights: ls -l.$"):
        read(tmp_path / "file")
