"""Mapped ranges: the right bytes, private, given back, and never past the end of a file."""

import gc
import os
from pathlib import Path

import pytest
import torch
from eaglehs.builder.file_map import ShardCutError, map_range, open_to_read, read_range
from eaglehs.schemas.errors import StorageError
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("map") / "bytes"
    path.write_bytes(os.urandom(20_000))
    return path


def num_mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@given(offset=st.integers(0, 19_999), length=st.integers(1, 20_000))
def test_any_range_shows_the_files_bytes_or_says_that_the_file_is_short(file: Path, offset: int, length: int):
    if offset + length > 20_000:
        with pytest.raises(ShardCutError, match=f"20,000 bytes, but data up to byte {offset + length}"):
            map_range(file, offset, length)
        return
    memory, shift, _ = map_range(file, offset, length)
    assert bytes(memory[shift : shift + length]) == file.read_bytes()[offset : offset + length]


def test_writing_changes_this_view_alone(file: Path):
    before = file.read_bytes()
    memory, shift, _ = map_range(file, 5000, 100)
    torch.frombuffer(memory, dtype=torch.uint8, offset=shift, count=100).zero_()
    assert bytes(memory[shift : shift + 100]) == bytes(100)
    again, _, _ = map_range(file, 5000, 100)
    assert bytes(again[shift : shift + 100]) == before[5000:5100]
    assert file.read_bytes() == before


def test_a_tensor_keeps_its_memory_and_the_last_one_gives_it_back(file: Path):
    memory, shift, _ = map_range(file, 8192, 64)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=shift, count=64)[2:]
    del memory
    gc.collect()
    assert num_mappings(file) == 1
    assert bytes(tensor.tolist()) == file.read_bytes()[8194:8256]
    del tensor
    gc.collect()
    assert num_mappings(file) == 0


def test_a_mapping_holds_no_descriptor(file: Path):
    before = len(os.listdir("/proc/self/fd"))
    kept = [map_range(file, 0, 100) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(kept) == 50


def test_a_missing_file_and_a_folder_are_storage_errors(tmp_path: Path):
    with pytest.raises(StorageError, match="can't be opened: No such file"):
        map_range(tmp_path / "x", 0, 1)
    with pytest.raises((StorageError, ShardCutError)):
        map_range(tmp_path, 0, 1)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, read = tmp_path / "bytes", os.preadv
    path.write_bytes(bytes(1000))

    def cut_first(*arguments: object) -> int:
        os.truncate(path, 100)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", cut_first)
    handle = open_to_read(path)
    with pytest.raises(ShardCutError, match="100 bytes, but data up to byte 1000 should be in it"):
        read_range(handle, path, 50, memoryview(bytearray(950)))
    os.close(handle)
