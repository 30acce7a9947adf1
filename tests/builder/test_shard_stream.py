"""A shard that is written from begin to end: the bytes of the writer of any order, and no byte that was not checked."""

import hashlib
from contextlib import ExitStack
from pathlib import Path

import pytest
from eaglehs.builder.sequential_file import BufferPool, SequentialFile
from eaglehs.builder.shard_stream import ShardStream
from eaglehs.builder.tar_writer import FileRange, ShardWriter, SourceChangedError, SourceCutError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.shards import arrays_of, meta_of, shard_of


def by_places(path: Path, shard) -> bytes:
    with path.open("w+b") as out:
        writer = ShardWriter(out, shard)
        for placed in reversed(shard.samples):
            arrays = arrays_of(placed)
            writer.write_sample(placed, meta_of(placed, arrays), {name: [c] for name, c in arrays.items()})
    return path.read_bytes()


@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(1, 400))
@settings(max_examples=25)
def test_the_bytes_are_those_of_any_order_from_memory_and_from_files_in_chunks(tmp_path_factory, lengths, chunk_rows):
    folder, shard = tmp_path_factory.mktemp("shard"), shard_of(*lengths)
    with (folder / "s.tar").open("w+b") as out, SequentialFile(out, BufferPool()) as file, ExitStack() as files:
        stream = ShardStream(file, shard)
        for placed in shard.samples:
            arrays = arrays_of(placed)
            pieces = {name: [content] for name, content in arrays.items()}
            for state in ("layer_1", "final"):
                source = folder / f"{placed.key}.{state}"
                source.write_bytes(b"head" + arrays[state])
                handle, step = files.enter_context(source.open("rb")).fileno(), chunk_rows * 128
                pieces[state] = [
                    FileRange(path=source, handle=handle, offset=4 + at, length=min(step, len(arrays[state]) - at))
                    for at in range(0, len(arrays[state]), step)
                ]
            stream.write_sample(placed, meta_of(placed, arrays), pieces)
        sha256 = stream.finish()
    written = (folder / "s.tar").read_bytes()
    assert written == by_places(folder / "other.tar", shard)
    assert sha256 == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize("array", ["input_ids", "loss_mask", "layer_1", "layer_2", "final"])
def test_an_array_that_is_not_the_one_that_was_checked_is_named(array, tmp_path: Path):
    shard = shard_of(200)
    [placed] = shard.samples
    arrays = arrays_of(placed)
    meta = meta_of(placed, arrays)
    arrays[array] = arrays[array][:-1] + bytes([arrays[array][-1] ^ 1])
    with (
        (tmp_path / "s.tar").open("w+b") as out,
        SequentialFile(out, BufferPool()) as file,
        pytest.raises(SourceChangedError, match=f"{array} of p0 has other bytes than when it was checked"),
    ):
        ShardStream(file, shard).write_sample(placed, meta, {name: [c] for name, c in arrays.items()})


def test_a_source_that_ends_too_soon_is_an_error_with_the_missing_bytes(tmp_path: Path):
    shard = shard_of(200)
    [placed] = shard.samples
    arrays = arrays_of(placed)
    source = tmp_path / "dump"
    source.write_bytes(arrays["final"][:-1000])
    with (tmp_path / "s.tar").open("w+b") as out, SequentialFile(out, BufferPool()) as file, source.open("rb") as dump:
        whole = FileRange(path=source, handle=dump.fileno(), offset=0, length=len(arrays["final"]))
        pieces = {name: [c] for name, c in arrays.items()} | {"final": [whole]}
        with pytest.raises(SourceCutError, match="ends 1,000 bytes before"):
            ShardStream(file, shard).write_sample(placed, meta_of(placed, arrays), pieces)
