"""A lock is one process's, and a file system without locks is told in words."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from eaglehs.builder.pack_state import locked as packing
from eaglehs.builder.publish_lock import publishing
from eaglehs.extraction.dump_folder import claimed
from eaglehs.extraction.run_store import locked as extracting
from eaglehs.schemas.errors import StorageError, UsageError
from eaglehs.schemas.locks import take_lock

from tests.factories.locks import lock_like_lustre


def test_a_lock_is_held_once_or_shared_until_the_file_is_closed(tmp_path):
    handles = [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]
    assert take_lock(handles[0], tmp_path)
    assert not take_lock(handles[1], tmp_path)
    assert not take_lock(handles[1], tmp_path, is_shared=True)
    os.close(handles[0])
    assert take_lock(handles[1], tmp_path, is_shared=True)
    assert take_lock(handles[2], tmp_path, is_shared=True)
    for handle in handles[1:]:
        os.close(handle)


@pytest.mark.parametrize("hold", [packing, claimed])
def test_a_folder_that_its_last_holder_removes_between_two_steps_is_made_again(hold, tmp_path, monkeypatch):
    """As a pack that came to nothing does, or a server's end, with the folder that it had made."""
    folder, steps = tmp_path / "d", []

    def removed_before(number, step):
        def run(*arguments, **named):
            steps.append(number)
            if steps.count(number) == 1 and folder.exists():
                shutil.rmtree(folder)
            return step(*arguments, **named)

        return run

    # Before the lock file is opened in the folder that was just made; and before the open file is locked.
    monkeypatch.setattr(os, "open", removed_before(0, os.open))
    monkeypatch.setattr(Path, "open", removed_before(1, Path.open))
    monkeypatch.setattr(fcntl, "flock", removed_before(2, fcntl.flock))
    with hold(folder):
        assert steps.count(2) == 2
        with pytest.raises(UsageError), hold(folder):
            pass


@pytest.mark.parametrize("hold", [extracting, packing, publishing, claimed])
def test_a_file_system_without_locks_is_named_and_is_no_traceback(hold, tmp_path, monkeypatch):
    lock_like_lustre(monkeypatch)
    num_open = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(StorageError, match=f"{tmp_path} can't be locked: Function not implemented.*Lustre"),
        hold(tmp_path),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == num_open
