"""A shard tells its layout and its first sample, or that it is none of ours."""

import io
import tarfile
from pathlib import Path

import pytest
from eaglehs.builder.plan import DatasetLayout
from eaglehs.builder.shard_head import ForeignShardError, first_meta, layout_of, scan_shard
from eaglehs.schemas.errors import DataError, RecordError, StorageError

from tests.factories.datasets import make_dataset


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_the_layout_and_the_first_sample_are_found_in_the_shard(tmp_path: Path):
    dataset = make_dataset(tmp_path, layers=(2, 10, 9), hidden_size=24)
    assert layout_of(dataset.shards[0]) == DatasetLayout(layers=(2, 9, 10), hidden_size=24)
    meta = first_meta(dataset.shards[0])
    assert (meta.key, meta.num_tokens) == ("p0", 5)


def test_scanned_rows_are_those_of_the_index(tmp_path: Path):
    from eaglehs.builder.index_store import read_index

    dataset = make_dataset(tmp_path)
    layout = DatasetLayout(layers=(2, 5, 9), hidden_size=16)
    found = [
        row
        for entry, path in zip(dataset.manifest.shards, dataset.shards, strict=True)
        for row in scan_shard(path, name=entry.name, layout=layout)
    ]
    assert found == list(read_index(dataset.folder.index))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "holds no member"),
        ({"a.txt": b"hello"}, r"begins with a\.txt \(5 bytes\), expected <key>\.meta\.json"),
        ({"a.meta.json": b"{}"}, "is of kind None"),
        ({"a.meta.json": b"\xff"}, "is not UTF-8 text"),
        ({"a.meta.json": b" " * (1024 * 1024 + 1)}, "has 1,048,577 bytes"),
    ],
)
def test_a_tar_of_something_else_is_refused(tmp_path: Path, members: dict[str, bytes], message: str):
    path = write_tar(tmp_path / "x.tar", members)
    with pytest.raises((ForeignShardError, RecordError), match=message):
        first_meta(path)


def test_a_sample_without_its_final_state_is_refused(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    with tarfile.open(dataset.shards[0]) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar if not m.name.endswith("final.bf16.npy")}
    with pytest.raises(DataError, match=r"sample p0 has no final\.bf16\.npy"):
        layout_of(write_tar(tmp_path / "x.tar", members))


def test_a_shard_that_is_not_there_is_a_storage_error(tmp_path: Path):
    with pytest.raises(StorageError, match="No such file"):
        first_meta(tmp_path / "x.tar")
