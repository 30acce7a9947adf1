"""The reader that follows a shard's writer: the hash of the finished file, every array compared, no wait on a fault."""

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from eaglehs.builder.index_rows import index_row
from eaglehs.builder.plan import DatasetLayout, PlannedSample, lay_out_shard
from eaglehs.builder.read_back import ReadBack, ShardReadBackError, read_back
from eaglehs.builder.tar_writer import ShardWriter
from eaglehs.builder.write_out import begin_write_out
from eaglehs.schemas.sample import SampleMeta, meta_content
from hypothesis import given, settings
from hypothesis import strategies as st

LAYOUT = DatasetLayout(layers=(1, 2), hidden_size=64)


def shard_of(*lengths: int):
    planned = [PlannedSample(key=f"p{i}", id=f"p{i}", source="s", num_tokens=n) for i, n in enumerate(lengths)]
    return lay_out_shard(0, planned, LAYOUT)


def arrays_of(placed) -> dict[str, bytes]:
    random = np.random.default_rng(placed.start + 1)
    return {spec.name: random.bytes(placed.sample.num_tokens * spec.row_bytes) for spec in LAYOUT.specs}


def meta_of(placed, arrays: dict[str, bytes]) -> SampleMeta:
    hashes = {name: xxhash.xxh3_128_hexdigest(content) for name, content in arrays.items()}
    sample = placed.sample
    return SampleMeta(
        key=placed.key,
        id=sample.id,
        source=sample.source,
        num_tokens=sample.num_tokens,
        num_trainable=0,
        next_token=1,
        xxh3_128=hashes,
    )


def write(writer: ShardWriter, placed, *, spoil: str = "") -> SampleMeta:
    """Write a sample; the array `spoil` gets another last byte than its hash is of."""
    arrays = arrays_of(placed)
    meta = meta_of(placed, arrays)
    if spoil:
        arrays[spoil] = arrays[spoil][:-1] + bytes([arrays[spoil][-1] ^ 1])
    writer.write_sample(placed, meta_content(meta, LAYOUT.layers), {n: [content] for n, content in arrays.items()})
    return meta


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5))
@settings(max_examples=25)
def test_the_hash_is_that_of_the_whole_file_though_it_is_read_while_it_is_written(tmp_path_factory, lengths):
    path, shard = tmp_path_factory.mktemp("shard") / "s.tar", shard_of(*lengths)
    with path.open("w+b") as out:
        writer = ShardWriter(out, shard)
        with ReadBack(out, path, shard.size_bytes) as reader:
            rows = []
            for placed in shard.samples:
                rows.append(index_row(placed, write(writer, placed), shard.name))
                reader.add(rows[-1])
            found = reader.sha256()
        assert found == read_back(out, path, rows, shard.size_bytes)
    assert found == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("array", ["input_ids", "loss_mask", "layer_1", "layer_2", "final"])
@pytest.mark.parametrize("key", ["p0", "p1", "p2"])
def test_an_array_with_other_bytes_is_named(array, key, tmp_path: Path):
    path, shard = tmp_path / "s.tar", shard_of(5, 200, 3)
    with path.open("w+b") as out:
        writer = ShardWriter(out, shard)
        with ReadBack(out, path, shard.size_bytes) as reader:
            for placed in shard.samples:
                meta = write(writer, placed, spoil=array if placed.key == key else "")
                reader.add(index_row(placed, meta, shard.name))
            with pytest.raises(ShardReadBackError, match=f"{array} of {key} reads back other bytes") as caught:
                reader.sha256()
    assert caught.value.key == key


@pytest.mark.parametrize("num_added", [0, 1, 2])
def test_a_fault_of_the_writer_ends_the_reader_at_once(num_added, tmp_path: Path):
    path, shard = tmp_path / "s.tar", shard_of(5, 6)
    with path.open("w+b") as out:
        writer = ShardWriter(out, shard)
        with pytest.raises(KeyboardInterrupt), ReadBack(out, path, shard.size_bytes) as reader:
            for placed in shard.samples[:num_added]:
                reader.add(index_row(placed, write(writer, placed), shard.name))
            raise KeyboardInterrupt
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read-back")]


def test_a_hint_to_write_out_that_can_not_be_followed_is_no_error():
    begin_write_out(-1, 0, 10)
