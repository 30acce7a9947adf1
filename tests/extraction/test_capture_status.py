"""`capture.json`: failed is final, and a full disk is not an excuse for silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from eaglehs.extraction import capture_status
from eaglehs.extraction.capture_status import StatusFile, forget_earlier_status
from eaglehs.extraction.dump_folder import clean
from eaglehs.schemas.codec import read_record, write_record
from eaglehs.schemas.dump import CaptureStatus
from eaglehs.schemas.errors import StorageError

from tests.factories.locks import lock_like_lustre, lock_like_nfs

READY = CaptureStatus(
    state="ready",
    message="",
    pid=1,
    model_class="LlamaForCausalLM",
    layers=(1, 4),
    num_layers=8,
    hidden_size=16,
    dtype="bfloat16",
    rid_prefix="eh-",
    engine_version="0.5.23",
    plugin_version="0.1.0",
)


def read(folder: Path) -> CaptureStatus:
    return read_record(CaptureStatus, folder / "capture.json")


def test_ready_is_written_as_given_into_a_folder_that_need_not_exist(tmp_path: Path) -> None:
    StatusFile(tmp_path / "new", READY).say_ready()
    assert read(tmp_path / "new") == READY


def test_the_first_failure_is_final(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, READY)
    status.say_ready()
    status.say_failed("the first")
    status.say_failed("the second")
    status.say_ready()
    assert (read(tmp_path).state, read(tmp_path).message) == ("failed", "the first")


def test_a_status_is_written_as_soon_as_the_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [OSError(28, "No space left on device")] * 2

    def full_twice(path: Path, record: CaptureStatus) -> None:
        if refusals:
            raise refusals.pop()
        write_record(path, record)

    monkeypatch.setattr(capture_status, "write_record", full_twice)
    StatusFile(tmp_path, READY).say_failed("no space")
    assert read(tmp_path).message == "no space"


def test_a_status_that_can_not_be_written_is_removed_so_that_ready_does_not_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = StatusFile(tmp_path, READY)
    status.say_ready()

    def full(path: Path, record: CaptureStatus) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(capture_status, "write_record", full)
    status.say_failed("no space")
    assert not (tmp_path / "capture.json").exists()


def test_a_replica_that_is_ready_does_not_hide_that_another_has_failed(tmp_path: Path) -> None:
    StatusFile(tmp_path, READY).say_failed("the first replica's disk")
    StatusFile(tmp_path, READY).say_ready()
    assert (read(tmp_path).state, read(tmp_path).message) == ("failed", "the first replica's disk")


def test_a_replica_that_fails_later_is_seen_though_the_others_were_ready(tmp_path: Path) -> None:
    first, second = StatusFile(tmp_path, READY), StatusFile(tmp_path, READY)
    first.say_ready()
    second.say_ready()
    second.say_failed("the second replica's disk")
    assert read(tmp_path).message == "the second replica's disk"


def test_a_status_that_is_no_record_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text("{")
    StatusFile(tmp_path, READY).say_ready()
    assert read(tmp_path) == READY


def test_what_an_earlier_server_said_is_forgotten(tmp_path: Path) -> None:
    StatusFile(tmp_path, READY).say_failed("yesterday")
    forget_earlier_status(tmp_path)
    forget_earlier_status(tmp_path / "gone")
    StatusFile(tmp_path, READY).say_ready()
    assert read(tmp_path).state == "ready"


_SAY = """
import os, sys
from pathlib import Path
from eaglehs.extraction.capture_status import StatusFile
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.dump import CaptureStatus
folder, word = Path(sys.argv[1]), sys.argv[2]
status = StatusFile(folder, read_record(CaptureStatus, folder / "sample.json"))
sys.stdin.readline()
status.say_ready() if word == "ready" else status.say_failed("of one replica")
"""


def test_replicas_share_a_status_on_nfs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_like_nfs(monkeypatch)
    first, second = StatusFile(tmp_path, READY), StatusFile(tmp_path, READY)
    first.say_ready()
    assert read(tmp_path).state == "ready"
    second.say_failed("the second replica's disk")
    first.say_ready()
    assert read(tmp_path).message == "the second replica's disk"


def test_a_folder_without_locks_is_never_called_ready_and_the_client_reads_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_like_lustre(monkeypatch)
    status = StatusFile(tmp_path, READY)
    with pytest.raises(StorageError, match="can't be locked") as caught:
        status.say_ready()
    assert not (tmp_path / "capture.json").exists()
    status.say_failed(str(caught.value))
    assert "Lustre without the mount option flock" in read(tmp_path).message


def test_what_a_server_leaves_beside_its_dumps_is_cleaned_up(tmp_path: Path) -> None:
    StatusFile(tmp_path, READY).say_ready()
    assert len(list(tmp_path.iterdir())) == 2
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_speak_at_once_end_in_failed_if_one_of_them_failed(tmp_path: Path) -> None:
    write_record(tmp_path / "sample.json", READY)
    words = ["ready", "failed", "ready", "ready"]
    replicas = [
        subprocess.Popen([sys.executable, "-c", _SAY, str(tmp_path), word], stdin=subprocess.PIPE) for word in words
    ]
    for replica in replicas:
        assert replica.stdin is not None
        replica.stdin.close()
    assert [replica.wait(60) for replica in replicas] == [0, 0, 0, 0]
    assert (read(tmp_path).state, read(tmp_path).message) == ("failed", "of one replica")
