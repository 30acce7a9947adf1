"""Each fault of a dataset with a codec is named with file, key and array, by every reader and by verify."""

import shutil
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_dataset
from eaglehs.builder.catalog import open_catalog
from eaglehs.builder.decode import ColumnError, decode
from eaglehs.builder.index_store import index_schema, index_table, read_index, write_index
from eaglehs.builder.planes import CodedBlockError
from eaglehs.builder.sample_reads import FlippedBitsError
from eaglehs.builder.shard_source import DatasetMismatchError
from eaglehs.builder.stream import stream
from eaglehs.builder.tar_header import tar_header
from eaglehs.builder.verify import verify_dataset
from eaglehs.schemas.errors import DataError
from eaglehs.schemas.index import IndexRow
from eaglehs.schemas.planes import PlanesHeadError, read_head

from tests.factories.coded import make_coded, make_good
from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.readable import LENGTHS
from tests.fakes.range_server import start_range_server


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_coded(tmp_path_factory.mktemp("coded"))


def damage(dataset: SyntheticDataset, row: IndexRow, array: str, offset: int = -1) -> None:
    """Flip a bit of a coded state, of its last block by default."""
    place = row.arrays[array]
    with dataset.folder.shard(row.shard).open("r+b") as shard:
        shard.seek(place.offset + offset % place.stored_bytes)
        byte = shard.read(1)
        shard.seek(-1, 1)
        shard.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("array", ["layer_2", "final"])
@pytest.mark.parametrize("offset", [-1, 60])
def test_a_flipped_bit_of_a_block_is_named_by_every_reader(tmp_path: Path, array: str, offset: int):
    dataset = make_good(tmp_path)
    row = open_catalog(dataset.root).rows[2]
    damage(dataset, row, array, offset)
    faults = verify_dataset(dataset.root).faults
    [own] = [fault for fault in faults if fault.array == array and "block" in fault.message]
    assert (own.file, own.key) == (row.shard, row.key)
    named = rf"{row.shard}: {array} of sample p2: block \d+ \(rows "
    for options in ({}, {"verify": True}, {"staging": "arena"}):
        with pytest.raises(CodedBlockError, match=named):
            list(stream(dataset.root, **options))
    stock = load_dataset(str(dataset.root), split="train", streaming=True)
    with pytest.raises(CodedBlockError, match=rf"{row.shard}: {array}.bf16.planes of sample p2: block \d+ "):
        for found in stock:
            decode(found)


@pytest.mark.parametrize("place", [0, 12, 16, 24, 28, 32, 36])
def test_a_flipped_bit_of_a_head_is_named_by_every_reader(tmp_path: Path, place: int):
    dataset = make_good(tmp_path)
    row = open_catalog(dataset.root).rows[2]
    damage(dataset, row, "final", place)
    faults = verify_dataset(dataset.root).faults
    assert any(fault.key == "p2" and fault.array == "final" for fault in faults)
    assert not [fault for fault in faults if fault.array == "final" and fault.key != "p2"]
    with pytest.raises((PlanesHeadError, CodedBlockError), match=rf"{row.shard}: final of sample p2: "):
        list(stream(dataset.root))


def test_quick_reads_the_heads_alone(tmp_path: Path):
    dataset = make_good(tmp_path)
    row = open_catalog(dataset.root).rows[2]
    damage(dataset, row, "final")
    assert verify_dataset(dataset.root, quick=True).is_good
    damage(dataset, row, "final", 12)
    [fault] = verify_dataset(dataset.root, quick=True).faults
    assert "p2.final.bf16.planes" in str(fault)


def test_a_flipped_bit_of_a_remote_block_is_named(tmp_path: Path):
    dataset = make_good(tmp_path)
    row = open_catalog(dataset.root).rows[2]
    damage(dataset, row, "final")
    server = start_range_server(dataset.root)
    with pytest.raises(CodedBlockError, match=rf"{row.shard}: final of sample p2: block "):
        list(stream(server.url))
    server.stop()


def test_ids_and_mask_are_still_held_against_the_index(tmp_path: Path):
    dataset = make_good(tmp_path)
    row = open_catalog(dataset.root).rows[2]
    damage(dataset, row, "input_ids")
    with pytest.raises(FlippedBitsError, match="input_ids of sample p2"):
        list(stream(dataset.root, verify=True))
    assert any(fault.array == "input_ids" and fault.key == "p2" for fault in verify_dataset(dataset.root).faults)


def test_a_shard_cut_in_a_block_is_named(tmp_path: Path):
    dataset = make_good(tmp_path)
    row = open_catalog(dataset.root).rows[2]
    path = dataset.folder.shard(row.shard)
    with path.open("r+b") as shard:
        shard.truncate(row.arrays["final"].offset + 100)
    faults = verify_dataset(dataset.root).faults
    assert {fault.file for fault in faults} == {row.shard}
    with pytest.raises(DataError, match=row.shard):
        list(stream(dataset.root))


def test_a_member_without_its_last_block_is_named(tmp_path: Path):
    """The tar itself is sound, as of a program that copied a block too few."""
    dataset = make_good(tmp_path, lengths=[12] * 2, shard_size_bytes=10**6)
    [path] = dataset.shards
    content = b""
    with tarfile.open(path) as archive:
        for member in archive:
            own = archive.extractfile(member).read()
            if member.name == "p1.layer_5.bf16.planes":
                own = own[: -read_head(own, where="x").blocks[-1][0]]
            content += tar_header(member.name, len(own)) + own + bytes(-len(own) % 512)
    content += bytes(1024)
    path.write_bytes(content + bytes(-len(content) % 10_240))
    messages = [str(fault) for fault in verify_dataset(dataset.root).faults]
    assert any("p1.layer_5.bf16.planes has " in message and "by its head" in message for message in messages)
    with pytest.raises(PlanesHeadError, match=rf"{path.name}: layer_5.bf16.planes of sample p1: .* It was cut"):
        for row in load_dataset(str(dataset.root), split="train", streaming=True):
            decode(row)


def test_a_state_of_another_sample_is_found_by_its_hash(tmp_path: Path):
    """Whole blocks with right checksums in the wrong place: only the index and meta.json know better."""
    dataset = make_good(tmp_path, lengths=[12] * 8, shard_size_bytes=10**6)
    by_size: dict[int, list[tuple[str, str, int]]] = {}
    for row in open_catalog(dataset.root).rows:
        for name, place in row.arrays.items():
            if place.coded is not None:
                by_size.setdefault(place.stored_bytes, []).append((row.key, name, place.offset))
    size, alike = max(by_size.items(), key=lambda item: len(item[1]))
    (_, _, source), (key, array, target), *_ = alike
    with dataset.shards[0].open("r+b") as shard:
        shard.seek(source)
        content = shard.read(size)
        shard.seek(target)
        shard.write(content)
    with pytest.raises(FlippedBitsError, match=f"{array} of sample {key}"):
        list(stream(dataset.root, verify=True))
    faults = verify_dataset(dataset.root).faults
    assert any("its bytes have hash" in f.message and (f.key, f.array) == (key, array) for f in faults)


def test_an_index_that_says_another_codec_or_width_is_refused(tmp_path: Path):
    dataset = make_good(tmp_path)
    rows = list(read_index(dataset.folder.index))
    place = rows[3].arrays["final"]
    rows[3].arrays["final"] = replace(place, coded=replace(place.coded, width=32))
    schema = index_schema(dataset.manifest.layers, is_coded=True)
    with dataset.folder.index.open("wb") as out:
        write_index(out, [index_table(rows, schema)], schema)
    with pytest.raises(DatasetMismatchError, match=r"final of sample p3 is planes-zstd \(<u2, width 32\) in the index"):
        stream(dataset.root)


def test_an_index_of_the_plain_dataset_is_refused(tmp_path: Path):
    plain = make_dataset(tmp_path / "plain", lengths=LENGTHS)
    coded = make_good(tmp_path / "coded")
    shutil.copy(plain.folder.index, coded.folder.index)
    with pytest.raises(DatasetMismatchError, match="is plain"):
        stream(coded.root)
    assert not verify_dataset(coded.root).is_good


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the sample has no such member"),
        ("text", "a value of type str, expected bytes"),
        (b"", "no coded state"),
        (b"EHPLANES", "no coded state"),
    ],
)
def test_a_column_that_is_no_coded_state_is_refused_by_name(dataset: SyntheticDataset, value, message: str):
    row = dict(next(iter(load_dataset(str(dataset.root), split="train", streaming=True))))
    row["final.bf16.planes"] = value
    with pytest.raises((ColumnError, PlanesHeadError), match=message) as caught:
        decode(row)
    assert "final.bf16.planes" in str(caught.value)


def test_a_state_with_other_rows_than_the_ids_is_refused(dataset: SyntheticDataset):
    rows = list(load_dataset(str(dataset.root), split="train", streaming=True))
    mixed = dict(rows[0]) | {"final.bf16.planes": rows[1]["final.bf16.planes"]}
    with pytest.raises(ColumnError, match=r"final\.bf16\.planes: 12 rows, but input_ids\.npy has 5"):
        decode(mixed)


def test_with_format_numpy_can_not_pass_for_the_states(dataset: SyntheticDataset):
    """It takes bytes for text without trailing zeros: what is left is refused, or is all of it."""
    rows = load_dataset(str(dataset.root), split="train", streaming=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows.with_format("numpy"):
            with pytest.raises(DataError):
                decode(row)
