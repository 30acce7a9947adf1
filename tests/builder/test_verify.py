"""Verify: what is good has no fault; each kind of damage is named with its place, and none hides another."""

import json
import os
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eaglehs.builder.index_store import read_index
from eaglehs.builder.verify import verify, verify_dataset, verify_run
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.progress import Silent

from tests.builder.test_pack_faults import poke
from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.runs import make_run, relist

LENGTHS = (5, 12, 33, 40, 7, 60)


@pytest.fixture
def dataset(tmp_path: Path) -> SyntheticDataset:
    return make_dataset(tmp_path, lengths=LENGTHS, chunk_rows=16)


def faults(dataset: SyntheticDataset) -> list[str]:
    return [str(fault) for fault in verify_dataset(dataset.root, workers=2).faults]


def place(dataset: SyntheticDataset, key: str, array: str):
    row = next(row for row in read_index(dataset.folder.index) if row.key == key)
    return dataset.folder.shard(row.shard), row.arrays[array]


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def change_manifest(dataset: SyntheticDataset, change) -> None:
    content = json.loads(dataset.folder.manifest.read_text())
    change(content)
    dataset.folder.manifest.write_text(json.dumps(content))


def change_index(dataset: SyntheticDataset, change) -> None:
    table = pq.read_table(dataset.folder.index)
    rows = change(table.to_pylist())
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), dataset.folder.index)


def test_a_good_dataset_and_run_have_no_fault_and_the_right_counts(dataset: SyntheticDataset):
    report = verify(dataset.root, Silent())
    assert (report.kind, report.faults, report.num_samples, report.num_tokens) == ("dataset", (), 6, sum(LENGTHS))
    assert report.size_bytes == dataset.manifest.totals.size_bytes
    run = verify(dataset.run.root, Silent())
    assert (run.kind, run.faults, run.num_samples, run.num_tokens) == ("run", (), 6, sum(LENGTHS))


def test_one_flipped_bit_of_a_state_names_sample_and_array(dataset: SyntheticDataset):
    path, where = place(dataset, "p3", "layer_5")
    overwrite(path, where.offset + 10, bytes([path.read_bytes()[where.offset + 10] ^ 1]))
    found = faults(dataset)
    assert len(found) == 2
    assert found[0].startswith("data/train-00002.tar: p3 layer_5: its bytes have hash")
    assert "SHA-256" in found[1]


@pytest.mark.parametrize(
    ("array", "row", "content", "message"),
    [
        ("final", 3, b"\xc0\x7f", "p3 final row 3: row 3 of final holds NaN"),
        ("layer_2", 39, b"\x80\xff", "p3 layer_2 row 39: row 39 of layer_2 holds an infinite value"),
        ("input_ids", 1, (1000).to_bytes(4, "little"), "p3 input_ids row 1: token id 1000 is outside"),
        ("input_ids", 39, b"\xff\xff\xff\xff", "p3 input_ids row 39: token id -1 is outside"),
        ("loss_mask", 2, b"\x07", "p3 loss_mask row 2: mask value 7"),
    ],
)
def test_values_that_cant_be_are_named_with_their_row(dataset: SyntheticDataset, array, row, content, message):
    path, where = place(dataset, "p3", array)
    overwrite(path, where.offset + row * (where.length // 40), content)
    assert any(message in fault for fault in faults(dataset))


def test_a_mask_of_another_count_is_named(dataset: SyntheticDataset):
    path, where = place(dataset, "p3", "loss_mask")
    mask = bytearray(path.read_bytes()[where.offset : where.offset + where.length])
    overwrite(path, where.offset, bytes([1 - mask[0]]))
    assert any("trainable tokens" in fault for fault in faults(dataset))


def test_states_alike_are_named(dataset: SyntheticDataset):
    path, source = place(dataset, "p3", "layer_2")
    _, target = place(dataset, "p3", "layer_9")
    overwrite(path, target.offset, path.read_bytes()[source.offset : source.offset + source.length])
    assert any("p3 layer_9: is identical with layer_2" in fault for fault in faults(dataset))


def test_missing_cut_foreign_and_unfinished_files_are_all_named(dataset: SyntheticDataset):
    one, two, *_ = dataset.shards
    one.unlink()
    os.truncate(two, 12_000)
    shutil.copy(dataset.shards[2], dataset.folder.data / "train-00077.tar")
    (dataset.folder.data / ".train-00003.tar.99.part").write_bytes(b"x")
    (dataset.root / "dataset.py").write_text("")
    text = "\n".join(faults(dataset))
    for message in (
        "data/train-00000.tar: can't be read: No such file",
        "data/train-00001.tar: has 12,000 bytes, manifest.json says 20,480",
        "data/train-00077.tar: is not in manifest.json",
        "data/.train-00003.tar.99.part: an unfinished file",
        "dataset.py: a Python file at the root",
    ):
        assert message in text


def test_a_shard_whose_structure_is_broken_is_still_read_by_the_index(dataset: SyntheticDataset):
    path, where = place(dataset, "p3", "layer_5")
    overwrite(path, 100, b"junk")
    overwrite(path, where.offset, b"\xc0\x7f")
    text = "\n".join(faults(dataset))
    assert "checksum is wrong" in text
    assert "p3 layer_5 row 0: row 0 of layer_5 holds NaN" in text


def test_another_shard_under_a_shards_name_is_named(dataset: SyntheticDataset):
    shutil.copy(dataset.shards[3], dataset.shards[2])
    text = "\n".join(faults(dataset))
    assert "p3: is in the index, not in the shard" in text
    assert "p5: is in the shard, not in the index" in text


def shift(rows: list) -> list:
    rows[3]["final.offset"] += 64
    return rows


def rename(rows: list) -> list:
    rows[3]["id"] = "other"
    return rows


def twice(rows: list) -> list:
    return [*rows, rows[0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shift, r"p3: index and shard differ: final is"),
        (rename, "p3: index and shard differ: id is 'other' in the index, 'p3' in the shard"),
        (lambda rows: rows[1:], "p0: is in the shard, not in the index"),
        (twice, "p0: is in data/train-00000.tar and in data/train-00000.tar"),
        (lambda rows: [row | {"shard": "data/train-00099.tar"} for row in rows], "which manifest.json does not list"),
        (lambda rows: rows[::-1], "another order"),
    ],
)
def test_an_index_that_does_not_fit_is_named(dataset: SyntheticDataset, change, message):
    change_index(dataset, change)
    assert any(message in fault for fault in faults(dataset))


def test_an_index_that_cant_be_read_does_not_stop_the_rest(dataset: SyntheticDataset):
    path, where = place(dataset, "p3", "layer_5")
    overwrite(path, where.offset, b"\xc0\x7f")
    os.truncate(dataset.folder.index, 100)
    text = "\n".join(faults(dataset))
    assert "_index/samples.parquet: can't be read" in text
    assert "holds NaN" in text
    assert "not in the index" not in text


def test_one_key_in_two_shards_is_named(tmp_path: Path):
    dataset = make_dataset(tmp_path, lengths=LENGTHS)
    change_index(dataset, lambda rows: [row | ({"key": "p0"} if row["key"] == "p5" else {}) for row in rows])
    assert any("it would be trained on twice" in fault for fault in faults(dataset))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["totals"].update(num_tokens=1), "says 1 token in all"),
        (lambda m: m["shards"][2].update(num_samples=9), "manifest.json says 9 of"),
        (lambda m: m["shards"][2].update(sha256="0" * 64), "manifest.json says 000"),
        (lambda m: m["shards"].append(m["shards"][0]), "lists data/train-00000.tar twice"),
        (lambda m: m.update(layers=[2, 5, 8]), "lacks layer_8"),
        (lambda m: m["model"].update(vocab_size=10), "outside the vocabulary of 10"),
        (lambda m: m.update(version=9), "A newer eaglehs wrote it"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(dataset: SyntheticDataset, change, message):
    change_manifest(dataset, change)
    assert any(message in fault for fault in faults(dataset))


def test_a_missing_manifest_is_a_fault_and_no_crash(dataset: SyntheticDataset):
    dataset.folder.manifest.unlink()
    [fault] = verify(dataset.root, Silent()).faults
    assert "pack again" in fault.message


def test_random_damage_is_always_found_and_never_a_crash(tmp_path: Path):
    dice = random.Random(5)
    dataset = make_dataset(tmp_path, lengths=(5, 12, 33))
    paths = [*dataset.shards, dataset.folder.manifest, dataset.folder.index]
    for _ in range(60):
        path = dice.choice(paths)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        if dice.random() < 0.3:
            damaged = damaged[: dice.randrange(len(whole))]
        else:
            damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        found = faults(dataset)
        if path.suffix == ".tar":
            assert found
        path.write_bytes(whole)
    assert faults(dataset) == []


def test_neither_run_nor_dataset_is_an_error_of_usage(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no folder"):
        verify(tmp_path / "none", Silent())
    with pytest.raises(UsageError, match="neither a run nor a dataset"):
        verify(tmp_path, Silent())


def test_every_bad_dump_of_a_run_is_named(tmp_path: Path):
    run = make_run(tmp_path, lengths=[20] * 8, chunk_rows=8, failed={"p7": "p7: x"}, unfinished=["p6"])
    poke(run.dumps_of("p1")[1], "final", 0, 2.0)
    poke(run.dumps_of("p2")[1], "final", 0, float("nan"))
    relist(run, "p2")
    run.dumps_of("p3")[0].unlink()
    os.truncate(run.dumps_of("p4")[2], 300)
    stranger = run.dumps_of("p5")[0].with_name("eh-0123abcd-p9-0.000000-000001.pt")
    stranger.write_bytes(b"x")
    report = verify_run(tmp_path)
    by_key = {fault.key: fault.message for fault in report.faults}
    assert "the ledger lists" in by_key["p1"]
    assert "row 8 of final holds NaN" in by_key["p2"]
    assert "is not there" in by_key["p3"]
    assert "not a whole dump" in by_key["p4"]
    assert "no ledger line names it" in by_key[""]
    assert len(report.faults) == 5
    assert report.num_samples == 6


@pytest.mark.parametrize("name", ["run.json", "prompts.parquet", "ledger.jsonl"])
def test_a_damaged_record_of_a_run_is_a_fault(tmp_path: Path, name):
    make_run(tmp_path)
    (tmp_path / name).write_bytes(b"{}\n")
    [fault] = verify(tmp_path, Silent()).faults
    assert fault.file.startswith(name)
