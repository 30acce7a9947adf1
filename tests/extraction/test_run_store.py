"""A run folder belongs to one process, and one set of inputs."""

import subprocess
import sys

import pytest
from eaglehs.extraction.run_store import locked, open_store
from eaglehs.schemas.errors import StorageError, UsageError
from eaglehs.schemas.run import RunFolder

from tests.factories.prompts import make_prompts
from tests.factories.records import engine_facts, prompt_facts, run_record


def test_two_extractions_into_one_run_lock_each_other_out(tmp_path):
    code = (
        "import sys; from pathlib import Path; from eaglehs.extraction.run_store import locked\n"
        "with locked(Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with locked(tmp_path):
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "another eaglehs extract is writing" in other.stderr
    assert subprocess.run(command, check=False).returncode == 0


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/run can't be written"), locked(tmp_path / "file" / "run"):
        pass


def test_an_opened_run_keeps_its_id_and_counts_its_starts(tmp_path):
    folder, prompts = RunFolder(tmp_path), make_prompts(2)
    first = open_store(folder, run_record(run_id="aaaaaaaa", starts=0), prompts)
    first.begin(engine_facts())
    again = open_store(folder, run_record(run_id="bbbbbbbb", starts=0), prompts)
    again.begin(engine_facts())
    assert (again.record.run_id, again.record.starts) == ("aaaaaaaa", 2)
    assert again.attempt_number(1) == 201


def test_other_prompts_are_refused_before_anything_is_written(tmp_path):
    folder = RunFolder(tmp_path)
    open_store(folder, run_record(), make_prompts(2))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="another prompt set"):
        open_store(folder, run_record(prompts=prompt_facts(fingerprint="0" * 32)), make_prompts(3))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_half_written_files_of_a_killed_start_are_removed(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / ".prompts.parquet.99.part").write_bytes(b"half")
    open_store(folder, run_record(), make_prompts(2))
    assert not list(tmp_path.glob(".*.part"))
