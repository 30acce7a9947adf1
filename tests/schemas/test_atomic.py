"""A file has its name only when it is whole."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from eaglehs.schemas.atomic import append_durably, staged, write_atomically


def test_a_block_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), staged(tmp_path / "x") as out:
        out.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path):
    write_atomically(tmp_path / "x", b"old")
    with pytest.raises(RuntimeError), staged(tmp_path / "x") as out:
        out.write(b"new")
        raise RuntimeError
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_killed_writer_leaves_only_a_hidden_part(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from eaglehs.schemas.atomic import staged\n"
        "with staged(Path(sys.argv[1]) / 'x') as out:\n"
        "    out.write(b'half'); out.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".x.")
    assert left.endswith(".part")


def test_a_line_that_the_disk_has_no_room_for_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    append_durably(path, "first")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        append_durably(path, "second")
    monkeypatch.undo()
    append_durably(path, "third")
    assert path.read_text() == "first\nthird\n"
