"""A lock is one process's, and a file system without locks is told in words."""

import os

import pytest
from eaglehs.builder.pack_state import locked as packing
from eaglehs.builder.publish_lock import publishing
from eaglehs.extraction.dump_folder import claimed
from eaglehs.extraction.run_store import locked as extracting
from eaglehs.schemas.errors import StorageError
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
