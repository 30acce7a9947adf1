"""The writer: format version 1 to the byte, and every way of copying gives the same bytes."""

import errno
import os
from pathlib import Path

import pytest
from eaglehs.builder import tar_writer
from eaglehs.builder.plan import DatasetLayout, PlannedSample, lay_out_shard
from eaglehs.builder.tar_writer import FileRange, ShardWriter, SourceCutError, copy_range
from eaglehs.schemas.sample import SampleMeta

from tests.golden import shard_v1


def golden_plan():
    planned = [
        PlannedSample(key=s["key"], id=s["id"], source=s["source"], num_tokens=len(s["ids"])) for s in shard_v1.SAMPLES
    ]
    return lay_out_shard(0, planned, DatasetLayout(layers=shard_v1.LAYERS, hidden_size=shard_v1.WIDTH))


def write_golden_sample(writer: ShardWriter, placed, number: int) -> None:
    given = shard_v1.SAMPLES[number]
    arrays = {m.partition(".")[0]: [a.tobytes()] for m, a in shard_v1.arrays_of(number).items()}
    hashes = {name: shard_v1.xxhash.xxh3_128_hexdigest(pieces[0]) for name, pieces in arrays.items()}
    meta = SampleMeta(
        key=given["key"],
        id=given["id"],
        source=given["source"],
        num_tokens=len(given["ids"]),
        num_trainable=sum(given["mask"]),
        next_token=given["next"],
        xxh3_128=hashes,
    )
    writer.write_sample(placed, meta, arrays)


def test_the_golden_shard_is_what_the_format_text_says():
    assert shard_v1.build() == shard_v1.PATH.read_bytes()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1)])
def test_the_writer_makes_the_golden_shard_in_any_order_of_samples(tmp_path: Path, order):
    shard = golden_plan()
    with (tmp_path / "x.tar").open("w+b") as out:
        writer = ShardWriter(out, shard)
        for number in order:
            write_golden_sample(writer, shard.samples[number], number)
    assert (tmp_path / "x.tar").read_bytes() == shard_v1.PATH.read_bytes()


@pytest.fixture
def source(tmp_path: Path):
    path = tmp_path / "source"
    path.write_bytes(bytes(range(256)) * 40)
    handle = os.open(path, os.O_RDONLY)
    yield FileRange(path=path, handle=handle, offset=100, length=9000)
    os.close(handle)


def refuse(code: int):
    def refusing(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return refusing


@pytest.mark.parametrize(
    "refused",
    [
        {},
        {"copy_file_range": refuse(errno.EXDEV)},
        {"copy_file_range": lambda *_, **__: 0},
        {"copy_file_range": refuse(errno.ENOSYS), "sendfile": refuse(errno.EINVAL)},
    ],
)
def test_every_way_of_copying_gives_the_same_bytes(tmp_path: Path, monkeypatch, source: FileRange, refused):
    for name, fake in refused.items():
        monkeypatch.setattr(os, name, fake)
    with (tmp_path / "out").open("w+b") as out:
        out.truncate(20_000)
        copy_range(source, out.fileno(), 512)
    content = (tmp_path / "out").read_bytes()
    assert content[512:9512] == source.path.read_bytes()[100:9100]
    assert not any(content[:512] + content[9512:])


def test_a_copy_in_many_short_steps_is_whole(tmp_path: Path, monkeypatch, source: FileRange):
    monkeypatch.setattr(tar_writer, "_STEP_BYTES", 700)
    with (tmp_path / "out").open("w+b") as out:
        copy_range(source, out.fileno(), 0)
    assert (tmp_path / "out").read_bytes() == source.path.read_bytes()[100:9100]


@pytest.mark.parametrize("refused", [{}, {"copy_file_range": refuse(errno.EXDEV), "sendfile": refuse(errno.EINVAL)}])
def test_a_source_that_became_shorter_is_an_error_with_the_missing_bytes(tmp_path, monkeypatch, source, refused):
    for name, fake in refused.items():
        monkeypatch.setattr(os, name, fake)
    os.truncate(source.path, 8000)
    with (tmp_path / "out").open("w+b") as out, pytest.raises(SourceCutError, match="1,100 bytes before"):
        copy_range(source, out.fileno(), 0)


def test_a_full_disk_is_not_taken_for_a_copy_that_is_not_supported(tmp_path, monkeypatch, source):
    monkeypatch.setattr(os, "copy_file_range", refuse(errno.ENOSPC))
    with (tmp_path / "out").open("w+b") as out, pytest.raises(OSError, match="No space left"):
        copy_range(source, out.fileno(), 0)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_bytes_are_copied_between_file_systems(tmp_path: Path):
    path = Path("/dev/shm") / f"eaglehs-test-{os.getpid()}"
    try:
        path.write_bytes(os.urandom(5000))
        with path.open("rb") as dump, (tmp_path / "out").open("w+b") as out:
            copy_range(FileRange(path=path, handle=dump.fileno(), offset=1, length=4999), out.fileno(), 7)
        assert (tmp_path / "out").read_bytes()[7:] == path.read_bytes()[1:]
    finally:
        path.unlink()
