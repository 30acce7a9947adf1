"""Lent mappings: valid for as long as they are held, unmapped soon after, and never by the loop."""

import ctypes
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from eaglehs.builder import file_map
from eaglehs.builder.file_map import ShardCutError
from eaglehs.builder.lent_maps import LentMaps, _Returned
from eaglehs.builder.stream import stream
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.readable import assert_all_samples, make_readable

MIB = 2**20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lent") / "bytes"
    path.write_bytes(os.urandom(4 * MIB))
    return path


def num_mappings(path: Path) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(str(path))


def wait_for_mappings(path: Path, count: int) -> None:
    """Wait until so many ranges are mapped, and see that it stays so."""
    end = time.monotonic() + 60
    while num_mappings(path) != count:
        assert time.monotonic() < end, f"{num_mappings(path)} mappings, not {count}"
        time.sleep(0.01)


class CallsOfLibc:
    """libc, which also notes which thread maps and unmaps."""

    def __init__(self, real: ctypes.CDLL) -> None:
        self.real = real
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            self.calls.append((name, threading.current_thread().name))
            return getattr(self.real, name)(*arguments)

        return call


def test_the_other_thread_unmaps_also_where_it_is_faster_than_who_lets_go(file: Path, monkeypatch: pytest.MonkeyPatch):
    libc, put = CallsOfLibc(file_map._libc), _Returned.put

    def put_slowly(*what: object) -> None:
        put(*what)
        end = time.monotonic() + 60
        while len(libc.calls) < 2 and time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr(file_map, "_libc", libc)
    monkeypatch.setattr(_Returned, "put", put_slowly)
    maps = LentMaps()
    block = maps.take(file, 5000, MIB)
    del block
    assert libc.calls[1:] == [("munmap", "eaglehs-unmap")]
    assert num_mappings(file) == 0
    maps.close()


def test_what_is_let_go_is_unmapped_by_another_thread(file: Path, monkeypatch: pytest.MonkeyPatch):
    libc = CallsOfLibc(file_map._libc)
    monkeypatch.setattr(file_map, "_libc", libc)
    maps = LentMaps()
    block = maps.take(file, 5000, MIB)
    view = block[100:200]
    del block
    assert num_mappings(file) == 1
    assert view.numpy().tobytes() == file.read_bytes()[5100:5200]
    del view
    wait_for_mappings(file, 0)
    assert libc.calls[1:] == [("munmap", "eaglehs-unmap")]
    maps.close()


@settings(max_examples=40)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, MIB - 1)), max_size=20),
    close_at=st.integers(0, 20),
)
def test_whoever_takes_a_range_sees_the_file_and_keeps_what_it_wrote(file: Path, steps, close_at):
    content, maps = file.read_bytes(), LentMaps()
    held: list[tuple[torch.Tensor, int, int]] = []
    for number, (part, is_held, place) in enumerate(steps):
        offset = part * (MIB - 100)  # neighbours share pages
        block = maps.take(file, offset, MIB)
        assert block.numpy().tobytes() == content[offset : offset + MIB]
        block[place] = mark = (content[offset + place] + 1) % 256
        if is_held:
            held.append((block, place, mark))
        del block
        if number == close_at:
            maps.close()
    maps.close()
    assert all(int(block[place]) == mark for block, place, mark in held)
    wait_for_mappings(file, len(held))
    held.clear()
    wait_for_mappings(file, 0)


def test_ranges_that_come_back_while_it_is_closed_are_unmapped_too(file: Path):
    for _ in range(20):
        maps = LentMaps()
        held = [maps.take(file, 0, 4096) for _ in range(50)]
        letting_go = threading.Thread(target=held.clear)
        letting_go.start()
        maps.close()
        letting_go.join()
        del maps
    wait_for_mappings(file, 0)


# ------------------------------------------------------------------ in a stream


def test_the_loop_neither_maps_nor_unmaps_nor_leaves_anything_behind(tmp_path: Path, monkeypatch):
    dataset = make_readable(tmp_path)
    libc = CallsOfLibc(file_map._libc)
    monkeypatch.setattr(file_map, "_libc", libc)
    samples = stream(dataset.root)
    for number, sample in enumerate(samples):
        if number % 2:
            sample["final"].zero_()
        wait_for_mappings(dataset.folder.data, 8 - number)  # this one, and those that are read ahead
    del sample
    wait_for_mappings(dataset.folder.data, 0)
    assert [name for name, _ in libc.calls].count("munmap") == 8
    last = libc.calls.pop()  # the last sample is let go after the end of its pass
    assert last == ("munmap", "MainThread")
    assert {thread for _, thread in libc.calls} <= {"eaglehs-plan", "eaglehs-read", "eaglehs-unmap"}
    assert_all_samples(list(samples), dataset)


def test_a_shard_that_is_cut_between_two_passes_is_an_error_and_not_a_crash(tmp_path: Path):
    dataset = make_readable(tmp_path)
    samples = stream(dataset.root)
    list(samples)
    os.truncate(dataset.shards[1], 2048)
    with pytest.raises(ShardCutError, match=r"train-00001\.tar: 2,048 bytes"):
        list(samples)


def test_a_pass_that_is_left_early_ends_its_thread(tmp_path: Path):
    dataset = make_readable(tmp_path)
    before = threading.active_count()
    for _ in range(3):
        next(iter(stream(dataset.root)))
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before
    wait_for_mappings(dataset.folder.data, 0)
