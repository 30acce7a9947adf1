"""Whose dump folder it is, and what may be removed from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from eaglehs.extraction import dump_folder
from eaglehs.extraction.dump_folder import LOCK_FILENAME, DumpFolderInUseError, ForeignFilesError, claimed, clean
from eaglehs.schemas.errors import StorageError

DUMP = "eh-run1-a-0.000000-000006.pt"


def test_a_folder_is_made_and_removed_again(tmp_path: Path):
    folder = tmp_path / "deep" / "dumps"
    with claimed(folder):
        (folder / DUMP).write_bytes(b"")
        assert (folder / LOCK_FILENAME).read_text() == str(os.getpid())
    assert not folder.exists()


def test_a_folder_that_was_there_stays_and_is_empty(tmp_path: Path):
    (tmp_path / DUMP).write_bytes(b"")
    with claimed(tmp_path):
        assert os.listdir(tmp_path) == [LOCK_FILENAME]
    assert os.listdir(tmp_path) == []


def test_a_claim_that_ends_with_an_error_is_cleaned_up_too(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), claimed(tmp_path):
        (tmp_path / DUMP).write_bytes(b"")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_a_second_claim_is_refused_and_harms_nothing(tmp_path: Path):
    with claimed(tmp_path):
        (tmp_path / DUMP).write_bytes(b"")
        with pytest.raises(DumpFolderInUseError, match=str(os.getpid())), claimed(tmp_path):
            pass
        assert (tmp_path / DUMP).exists()
    with claimed(tmp_path):
        pass


def test_a_claim_waits_for_the_server_of_a_killed_run_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = f"""
import os, sys
from pathlib import Path
from eaglehs.extraction.dump_folder import claimed
with claimed(Path({str(tmp_path)!r})):
    if os.fork():
        os._exit(0)  # killed; its child, like the guard, holds the lock a little longer
    sys.stdin.read()
    os._exit(0)
"""
    killed = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    assert killed.wait() == 0
    tries, take = [], dump_folder.take_lock

    def tried(lock: int, where: Path) -> bool:
        tries.append(take(lock, where))
        if len(tries) == 3:
            killed.communicate()  # its child ends
        return tries[-1]

    monkeypatch.setattr(dump_folder, "take_lock", tried)
    with claimed(tmp_path):
        assert tries[:3] == [False] * 3


def test_files_that_are_not_ours_are_never_removed(tmp_path: Path):
    for name in (DUMP, "capture.json", f".{DUMP}.12.34.part", "notes.txt", "eh-notes.pt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ForeignFilesError, match=r"2 files that are no dumps, such as 'eh-notes.pt'"):
        clean(tmp_path)
    assert len(os.listdir(tmp_path)) == 5


def test_with_a_prefix_only_dumps_of_those_requests_go(tmp_path: Path):
    names = [DUMP, "eh-run2-a-0.000000-000006.pt", "capture.json", "notes.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert clean(tmp_path, rid_prefix="eh-run1-") == 1
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match=r"file/dumps can't be made.*--dump-dir"),
        claimed(tmp_path / "file" / "dumps"),
    ):
        pass
