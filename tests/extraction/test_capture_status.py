"""`capture.json`: failed is final, and a full disk is not an excuse for silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from eaglehs.extraction import capture_status
from eaglehs.extraction.capture_status import StatusFile
from eaglehs.schemas.codec import read_record, write_record
from eaglehs.schemas.dump import CaptureStatus

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
    assert list(tmp_path.iterdir()) == []
