"""A written shard is read back: the hash of the whole file, and every array against the hash of its check."""

import hashlib
from pathlib import Path

import pytest
from eaglehs.builder.index_rows import index_row
from eaglehs.builder.read_back import ShardReadBackError, read_back
from eaglehs.builder.tar_writer import ShardWriter
from eaglehs.builder.write_out import begin_write_out
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.shards import arrays_of, meta_of, shard_of


def write(path: Path, shard, *, spoil: tuple[str, str] = ("", "")) -> list:
    """Write all samples, the last first; the array `spoil`, (key, name), gets another last byte than its hash is of."""
    rows = []
    with path.open("w+b") as out:
        writer = ShardWriter(out, shard)
        for placed in reversed(shard.samples):
            arrays = arrays_of(placed)
            meta = meta_of(placed, arrays)
            if placed.key == spoil[0]:
                good = arrays[spoil[1]]
                arrays[spoil[1]] = good[:-1] + bytes([good[-1] ^ 1])
            writer.write_sample(placed, meta, {name: [content] for name, content in arrays.items()})
            rows.insert(0, index_row(placed, meta, shard.name))
    return rows


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5))
@settings(max_examples=25)
def test_the_hash_is_that_of_the_whole_file(tmp_path_factory, lengths):
    path, shard = tmp_path_factory.mktemp("shard") / "s.tar", shard_of(*lengths)
    rows = write(path, shard)
    with path.open("rb") as out:
        assert read_back(out, path, rows, shard.size_bytes) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("array", ["input_ids", "loss_mask", "layer_1", "layer_2", "final"])
@pytest.mark.parametrize("key", ["p0", "p1", "p2"])
def test_an_array_with_other_bytes_is_named(array, key, tmp_path: Path):
    path, shard = tmp_path / "s.tar", shard_of(5, 200, 3)
    rows = write(path, shard, spoil=(key, array))
    with (
        path.open("rb") as out,
        pytest.raises(ShardReadBackError, match=f"{array} of {key} reads back other bytes") as caught,
    ):
        read_back(out, path, rows, shard.size_bytes)
    assert caught.value.key == key


def test_a_hint_to_write_out_that_can_not_be_followed_is_no_error():
    begin_write_out(-1, 0, 10)
