"""A file that is written past the page cache: its bytes and hash, where that can't be done, and a full disk."""

import errno
import fcntl
import hashlib
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from eaglehs.builder import sequential_file
from eaglehs.builder.sequential_file import BufferPool, SequentialFile
from hypothesis import given, settings
from hypothesis import strategies as st

MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(sequential_file, "BUFFER_BYTES", 8192)
    monkeypatch.setattr(sequential_file, "MOST_PER_FILE", 3)
    monkeypatch.setattr(sequential_file, "_BUFFERED_STEP_BYTES", 1000)


def no_direct(handle, command, flags=0):
    if command == fcntl.F_SETFL and flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return fcntl_of(handle, command, flags)


fcntl_of, mmap_of = fcntl.fcntl, mmap.mmap


def write(path: Path, parts: list[bytes]) -> str:
    with path.open("w+b") as out, SequentialFile(out, BufferPool()) as file:
        for number, part in enumerate(parts):
            assert file.size_bytes == sum(map(len, parts[:number]))
            file.write(part)
        return file.finish()


def check(path: Path, parts: list[bytes]) -> None:
    sha256 = write(path, parts)
    assert path.read_bytes() == b"".join(parts)
    assert sha256 == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize(("num_files", "per_file"), [(1, 16), (2, 16), (3, 10), (4, 8), (100, 2)])
def test_the_memory_of_all_files_is_bounded_however_many_there_are(monkeypatch, num_files, per_file):
    monkeypatch.setattr(sequential_file, "MOST_PER_FILE", 16)
    assert BufferPool(num_files).per_file == per_file


def test_a_file_takes_no_more_buffers_than_it_may(tmp_path: Path, monkeypatch):
    taken = []
    monkeypatch.setattr(sequential_file.mmap, "mmap", lambda *of: taken.append(mmap_of(*of)) or taken[-1])
    with (tmp_path / "f").open("w+b") as out, SequentialFile(out, BufferPool(num_files=16)) as file:
        file.write(bytes(20 * sequential_file.BUFFER_BYTES))
        file.finish()
    assert len(taken) == 2


LENGTHS = st.lists(st.one_of(st.integers(0, 100), st.sampled_from([4096, 8191, 8192, 8193, 40_000])), max_size=12)


@given(LENGTHS)
@settings(max_examples=50)
def test_any_parts_come_to_the_disk_in_order_with_the_hash_of_the_whole(tmp_path_factory, lengths):
    random = np.random.default_rng(len(lengths))
    check(tmp_path_factory.mktemp("file") / "f", [random.bytes(length) for length in lengths])


@pytest.mark.parametrize("length", [0, 1, 4096, 8192, 100_001])
@pytest.mark.parametrize("refusal", ["when it is asked for", "at the first write", "in memory"])
def test_a_file_system_that_can_not_write_past_the_page_cache_gets_the_same_bytes(
    tmp_path: Path, monkeypatch, refusal, length
):
    real = os.pwrite
    path = tmp_path / "f"
    if refusal == "when it is asked for":
        monkeypatch.setattr(sequential_file.fcntl, "fcntl", no_direct)
    elif refusal == "at the first write":

        def pwrite(handle, content, offset):
            if fcntl_of(handle, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(handle, content, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
    else:
        path = MEMORY / f"eaglehs-test-{os.getpid()}-{length}"
    try:
        check(path, [np.random.default_rng(1).bytes(length)])
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("num_good", [1, 2, 7])
@pytest.mark.parametrize("step", [0, 1, 4096, 5000])
def test_writes_that_are_cut_or_refused_in_the_middle_of_the_file_lose_nothing(
    tmp_path: Path, monkeypatch, num_good: int, step: int
):
    """`step`: what is taken of each write behind the first ones, so that the rest may be unaligned; 0: a refusal."""
    real, calls = os.pwrite, []

    def pwrite(handle, content, offset):
        calls.append(offset)
        is_direct = fcntl_of(handle, fcntl.F_GETFL) & os.O_DIRECT
        if not is_direct or len(calls) <= num_good:
            return real(handle, content, offset)
        if offset % 4096 or not step:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(buffered.fileno(), content[:step], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    (tmp_path / "f").touch()
    with (tmp_path / "f").open("r+b") as buffered:
        check(tmp_path / "f", [np.random.default_rng(1).bytes(100_001)])


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_memory_is_a_ring_that_is_used_again_for_the_next_file(tmp_path: Path, monkeypatch, is_broken_off):
    made, real = [], sequential_file.mmap.mmap
    monkeypatch.setattr(sequential_file.mmap, "mmap", lambda *given: made.append(1) or real(*given))
    buffers = BufferPool()
    for number in range(3):
        with (tmp_path / str(number)).open("w+b") as out, SequentialFile(out, buffers) as file:
            file.write(bytes(range(256)) * 1001)
            if not is_broken_off:
                file.finish()
    assert len(made) == 3


def test_what_fills_the_room_in_place_is_what_is_written(tmp_path: Path):
    with (tmp_path / "f").open("w+b") as out, SequentialFile(out, BufferPool()) as file:
        for number in range(10):
            room = file.room(5000)
            assert 1 <= len(room) <= 5000
            room[:700] = bytes([number]) * 700
            file.advance(min(700, len(room)))
        file.finish()
    content = (tmp_path / "f").read_bytes()
    assert [content[i * 700] for i in range(10)] == list(range(10))


@pytest.mark.parametrize("when", ["room", "finish"])
def test_a_full_disk_is_told_and_no_thread_is_left(tmp_path: Path, monkeypatch, when):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "f", [bytes(8192 * (5 if when == "room" else 1))])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shard-")]


def test_a_fault_of_the_caller_ends_the_threads_at_once(tmp_path: Path):
    with (
        pytest.raises(KeyboardInterrupt),
        (tmp_path / "f").open("w+b") as out,
        SequentialFile(out, BufferPool()) as file,
    ):
        file.write(bytes(30_000))
        raise KeyboardInterrupt
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shard-")]
