"""The reader goes round with the writer, and refuses whatever the writer never writes, with file, member and place."""

import io
import os
import random
import tarfile
from pathlib import Path

import pytest
from eaglehs.builder.index_store import read_index
from eaglehs.builder.plan import DatasetLayout
from eaglehs.builder.tar_reader import OpenShard, ShardStructureError, read_members, read_samples
from eaglehs.schemas.errors import DataError

from tests.factories.datasets import make_dataset
from tests.factories.dumps import HIDDEN_SIZE, LAYERS
from tests.golden import shard_v1

LAYOUT = DatasetLayout(layers=LAYERS, hidden_size=HIDDEN_SIZE)
NAME = "data/train-00000.tar"


def rows_of(path: Path, layout: DatasetLayout = LAYOUT) -> list:
    with path.open("rb") as file:
        shard = OpenShard(path=path, handle=file.fileno(), size_bytes=os.fstat(file.fileno()).st_size)
        return list(read_samples(shard, NAME, layout))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    dataset = make_dataset(tmp_path, lengths=(5, 12, 33), shard_size_bytes=10**6)
    return dataset.folder.shard(NAME)


def retar(path: Path, change) -> Path:
    """Write the members anew in the order that `change` gives to the list of (name, content)."""
    with tarfile.open(path) as tar:
        contents = [(member.name, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in change(contents):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_the_reader_finds_what_the_index_says(tmp_path: Path):
    dataset = make_dataset(tmp_path, lengths=(5, 12, 33, 200), shard_size_bytes=10**6)
    assert rows_of(dataset.folder.shard(NAME)) == list(read_index(dataset.folder.index))


def test_the_golden_shard_is_read():
    rows = rows_of(shard_v1.PATH, DatasetLayout(layers=shard_v1.LAYERS, hidden_size=shard_v1.WIDTH))
    assert [(row.key, row.id, row.num_tokens, row.next_token) for row in rows] == [
        (given["key"], given["id"], len(given["ids"]), given["next"]) for given in shard_v1.SAMPLES
    ]
    content = shard_v1.PATH.read_bytes()
    for number, row in enumerate(rows):
        for wanted, place in zip(shard_v1.arrays_of(number).values(), row.arrays.values(), strict=True):
            assert content[place.offset : place.offset + place.length] == wanted.tobytes()


def test_shards_that_other_tar_tools_wrote_anew_are_read(shard: Path):
    before = rows_of(shard)
    assert [row.key for row in rows_of(retar(shard, lambda members: members))] == [row.key for row in before]


def test_a_shard_cut_anywhere_is_refused_with_its_name(shard: Path):
    whole = shard.read_bytes()
    for cut in (0, 1, 511, 512, 5120, 10_240, len(whole) - 10_240, len(whole) - 1024, len(whole) - 1):
        shard.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"train-00000\.tar"):
            rows_of(shard)


def test_a_flipped_bit_is_an_error_of_ours_or_no_matter_of_structure(shard: Path):
    whole, right = shard.read_bytes(), rows_of(shard)
    dice = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        shard.write_bytes(damaged)
        try:
            found = rows_of(shard)
        except DataError:
            continue
        assert len(found) == len(right)
        assert [list(row.arrays) for row in found] == [list(row.arrays) for row in right]


def swapped(members):
    return [members[0], members[2], members[1], *members[3:]]


def without_final(members):
    return [member for member in members if member[0] != "p1.final.bf16.npy"]


def with_stranger(members):
    return [*members[:7], ("p0.layer_7.bf16.npy", members[6][1]), *members[7:]]


def doubled(members):
    return [*members[:7], members[6], *members[7:]]


def torn_apart(members):
    return [*members[:6], *members[7:14], members[6], *members[14:]]


def other_key_in_meta(members):
    return [(members[0][0], members[7][1]), *members[1:]]


def shorter_array(members):
    return [(name, content[:-2] if name == "p1.layer_5.bf16.npy" else content) for name, content in members]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swapped, r"sample p0 has its members in the order meta\.json, loss_mask"),
        (without_final, r"sample p1 lacks final\.bf16\.npy"),
        (with_stranger, r"sample p0 has an unknown layer_7\.bf16\.npy"),
        (doubled, r"sample p0 has twice final\.bf16\.npy"),
        (torn_apart, r"sample p0 lacks final|stands apart"),
        (lambda members: [*members, members[0]], "p0.meta.json stands apart from its sample"),
        (other_key_in_meta, "is of key p1"),
        (shorter_array, r"p1\.layer_5\.bf16\.npy is .* expected"),
        (lambda _: [], "holds no sample"),
    ],
)
def test_members_that_are_not_whole_samples_in_order_are_refused(shard: Path, change, message):
    with pytest.raises(DataError, match=message):
        rows_of(retar(shard, change))


def test_states_of_another_width_or_layer_are_refused(shard: Path):
    with pytest.raises(ShardStructureError, match=r"\[5, 16\].* expected <u2 \[5, 32\]"):
        rows_of(shard, DatasetLayout(layers=LAYERS, hidden_size=32))
    with pytest.raises(ShardStructureError, match="lacks layer_8"):
        rows_of(shard, DatasetLayout(layers=(2, 5, 8), hidden_size=HIDDEN_SIZE))


def test_bytes_after_the_end_and_dirty_filling_are_refused(shard: Path):
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ShardStructureError, match="after the archive's end"):
        rows_of(shard)
    with shard.open("rb") as file:
        opened = OpenShard(path=shard, handle=file.fileno(), size_bytes=len(whole))
        member = next(read_members(opened))
    place = next(place for row in rows_of_bytes(shard, whole) for place in row.arrays.values())
    end = place.offset + place.length
    shard.write_bytes(whole[:end] + b"x" + whole[end + 1 :])
    with pytest.raises(ShardStructureError, match=r"filling after p0\.input_ids"):
        rows_of(shard)
    assert member.name == "p0.meta.json"


def rows_of_bytes(path: Path, content: bytes) -> list:
    path.write_bytes(content)
    return rows_of(path)
