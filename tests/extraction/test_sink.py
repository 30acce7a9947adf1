"""The dump writer: what it writes, what it refuses, and that nothing half-written has a final name."""

from __future__ import annotations

import errno
import io
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eaglehs.extraction import sink
from eaglehs.extraction.sink import DumpContentError, DumpWriteError, rows_alone, write_dump
from eaglehs.schemas.dump import DumpName, DumpNameError
from torch import Tensor

LAYERS = (1, 4)
NAME = DumpName(rid="eh-run1-a-0", start=64, end=70)


def states_of(num_rows: int, width: int = 8) -> dict[str, Tensor]:
    return {name: torch.randn(num_rows, width).bfloat16() for name in ("layer_1", "layer_4", "final")}


def write(folder: Path, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "layers": LAYERS,
        "prompt_tokens": 70,
        "input_ids": torch.arange(6, dtype=torch.int32),
        "states": states_of(6),
    }
    return write_dump(folder, changes.pop("name", NAME), **{**given, **changes})


def test_a_dump_holds_what_the_format_says_and_reads_safely_from_a_mapping(tmp_path: Path) -> None:
    states = states_of(6)
    path = write(tmp_path, states=states)
    assert path == tmp_path / "eh-run1-a-0.000064-000070.pt"
    record = torch.load(path, weights_only=True, mmap=True)
    plain = {key: value for key, value in record.items() if not isinstance(value, Tensor)}
    assert plain == {
        "kind": "eaglehs.dump",
        "version": 1,
        "rid": "eh-run1-a-0",
        "start": 64,
        "end": 70,
        "prompt_tokens": 70,
        "capture": "layer_input",
        "layers": [1, 4],
    }
    assert record["input_ids"].dtype == torch.int32
    assert record["input_ids"].tolist() == list(range(6))
    for name, state in states.items():
        assert record[name].dtype == torch.bfloat16
        assert torch.equal(record[name], state)
    assert set(record) == {*plain, "input_ids", *states}


def test_bits_that_are_no_numbers_survive(tmp_path: Path) -> None:
    bits = torch.tensor([[0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7F7F, 0x0080]] * 6, dtype=torch.int32)
    odd = bits.to(torch.int16).view(torch.bfloat16)
    record = torch.load(write(tmp_path, states={**states_of(6), "final": odd}), weights_only=True)
    assert torch.equal(record["final"].view(torch.int16), odd.view(torch.int16))


def test_a_view_does_not_drag_its_buffer_along(tmp_path: Path) -> None:
    ring = torch.randn(3, 4096, 64).bfloat16()
    ids = torch.arange(4096, dtype=torch.int32)
    states = {name: ring[i, 100:106] for i, name in enumerate(("layer_1", "layer_4", "final"))}
    path = write(tmp_path, input_ids=ids[100:106], states=states)
    assert path.stat().st_size < 6 * 64 * 2 * 3 + 6 * 4 + 4096  # its rows, and room for zip and pickle headers
    record = torch.load(path, weights_only=True)
    assert torch.equal(record["layer_4"], ring[1, 100:106])
    assert record["input_ids"].tolist() == list(range(100, 106))


def test_rows_alone_share_the_memory_of_their_buffer_and_keep_it_alive() -> None:
    ring = torch.arange(40, dtype=torch.int32).reshape(10, 4)
    alone = rows_alone(ring[2:5])
    assert alone.data_ptr() == ring[2:5].data_ptr()
    assert alone.untyped_storage().nbytes() == 3 * 4 * 4
    del ring
    assert alone.flatten().tolist() == list(range(8, 20))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"states": states_of(5)}, ["layer_1", "[5, 8]", "[6, 8]"]),
        ({"states": {"layer_1": states_of(6)["layer_1"]}}, ["layer_4", "final"]),
        ({"states": {**states_of(6), "layer_7": states_of(6)["final"]}}, ["layer_7"]),
        ({"states": {**states_of(6), "final": torch.zeros(6, 8)}}, ["final", "float32", "bfloat16"]),
        ({"states": {**states_of(6), "layer_4": states_of(6, 4)["final"]}}, ["layer_4", "[6, 4]"]),
        ({"states": {**states_of(6), "layer_1": states_of(8)["final"].T[:6, :8]}}, ["layer_1", "strided"]),
        ({"input_ids": torch.arange(6)}, ["input_ids", "int64", "int32"]),
        ({"input_ids": torch.arange(7, dtype=torch.int32)}, ["input_ids", "[7]", "[6]"]),
    ],
)
def test_arrays_that_are_not_what_the_name_says_are_refused_with_both(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(DumpContentError) as caught:
        write(tmp_path, **changes)
    assert all(word in str(caught.value) for word in [NAME.filename, *words])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rid", ["../evil", "eh-../evil", "eh-run-a", "eh-run-/etc/x-0", "eh-run-a.b-0", "", "a" * 300])
def test_a_request_id_that_is_no_safe_name_writes_nothing(tmp_path: Path, rid: str) -> None:
    inner = tmp_path / "dumps"
    inner.mkdir()
    with pytest.raises(DumpNameError):
        write(inner, name=DumpName(rid=rid, start=0, end=6))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("start", "end"), [(6, 6), (7, 6), (-6, 0)])
def test_an_empty_or_negative_range_is_refused(tmp_path: Path, start: int, end: int) -> None:
    with pytest.raises(DumpNameError):
        write(tmp_path, name=DumpName(rid=NAME.rid, start=start, end=end))


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DumpWriteError, match="No such file") as caught:
        write(tmp_path / "gone")
    assert str(tmp_path / "gone") in str(caught.value)
    assert caught.value.exit_code == 4


def full_after(limit: int) -> Callable[..., Any]:
    """Return an `open` whose files take `limit` bytes and then say that the disk is full, as a real one does."""

    class FullRaw(io.FileIO):
        def write(self, data: Any) -> int:
            room = limit - self.tell()
            if room <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(memoryview(data).cast("B")[:room])

    return lambda path, _mode: io.BufferedRandom(FullRaw(path, "w+b"))


@pytest.mark.parametrize("limit", [0, 50, 5_000, 40_000])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(Path, "open", full_after(limit))
    with pytest.raises(DumpWriteError, match="No space left"):
        write(tmp_path, states=states_of(6, 4096))
    assert list(tmp_path.iterdir()) == []


def test_threads_at_the_same_name_leave_one_whole_file(tmp_path: Path) -> None:
    states = states_of(6, 2048)
    threads = [threading.Thread(target=write, args=(tmp_path,), kwargs={"states": states}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == [NAME.filename]
    assert torch.equal(torch.load(tmp_path / NAME.filename, weights_only=True)["final"], states["final"])


def test_processes_at_the_same_name_leave_one_whole_file(tmp_path: Path) -> None:
    """As four tensor-parallel ranks would, if each wrote."""
    states = states_of(6, 2048)
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(4)

    def rank() -> None:
        begin.wait()
        for _ in range(20):
            write(tmp_path, states=states)

    ranks = [context.Process(target=rank) for _ in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [NAME.filename]
    assert torch.equal(torch.load(tmp_path / NAME.filename, weights_only=True)["final"], states["final"])


def test_no_name_of_a_dump_shows_before_the_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    real = torch.save

    def spying(record: object, out: Any) -> None:
        real(record, out)
        seen.append([path.name for path in tmp_path.iterdir() if not path.name.startswith(".")])

    monkeypatch.setattr(sink.torch, "save", spying)
    write(tmp_path)
    assert seen == [[]]
