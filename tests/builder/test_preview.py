"""The preview holds what the dataset holds, loads by stock readers beside the shards, and verify knows it."""

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from datasets import load_dataset
from eaglehs.builder.decode import decode
from eaglehs.builder.preview import PreviewSettings, preview_faults, remove_preview, write_preview
from eaglehs.builder.tar_reader import OpenShard, read_members
from eaglehs.builder.verify import verify_dataset
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.preview import PreviewFolder

from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.readable import assert_all_samples, make_readable

Damage = Callable[[PreviewFolder], None]


@pytest.fixture
def dataset(tmp_path: Path) -> SyntheticDataset:
    return make_dataset(tmp_path)


def to_text(ids) -> str:
    return " ".join(f"t{token}" for token in ids)


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_a_preview_holds_ids_mask_counts_and_text_of_its_samples(dataset: SyntheticDataset):
    record = write_preview(dataset.root, PreviewSettings(num_samples=2, max_tokens=7, to_text=to_text))
    found = members(PreviewFolder(dataset.root).shard)
    columns = ("id.txt", "num_tokens.json", "num_trainable.json", "input_ids.json", "loss_mask.json", "text.txt")
    assert list(found) == [f"{key}.{name}" for key in ("p0", "p2") for name in columns]
    bits = dataset.bits("p2")
    ids = bits["input_ids"][:, 0].tolist()
    assert found["p2.id.txt"] == b"p2"
    assert json.loads(found["p2.num_tokens.json"]) == 33
    assert json.loads(found["p2.num_trainable.json"]) == int(bits["loss_mask"].sum())
    assert json.loads(found["p2.input_ids.json"]) == ids[:7]
    assert json.loads(found["p2.loss_mask.json"]) == bits["loss_mask"][:7, 0].tolist()
    assert found["p2.text.txt"].decode() == to_text(ids[:7])
    assert (record.num_samples, record.max_tokens, record.has_text) == (2, 7, True)
    assert record.content_bytes == sum(map(len, found.values()))


def test_the_same_preview_is_the_same_bytes_and_a_strict_tar(dataset: SyntheticDataset):
    path = PreviewFolder(dataset.root).shard
    first = write_preview(dataset.root, PreviewSettings(num_samples=3))
    content = path.read_bytes()
    assert write_preview(dataset.root, PreviewSettings(num_samples=3)) == first
    assert path.read_bytes() == content
    assert len(content) == first.size_bytes
    with path.open("rb") as file:
        shard = OpenShard(path=path, handle=file.fileno(), size_bytes=len(content))
        assert len(list(read_members(shard))) == 15


def test_stock_datasets_loads_both_configs_streaming_or_not(tmp_path: Path):
    dataset = make_readable(tmp_path)
    write_preview(dataset.root, PreviewSettings(num_samples=4, to_text=to_text))
    write_card(dataset.root)
    for streaming in (True, False):
        options = {"split": "train", "streaming": streaming, "cache_dir": str(tmp_path / "cache")}
        rows = list(load_dataset(str(dataset.root), "preview", **options))
        assert [row["__key__"] for row in rows] == ["p0", "p2", "p5", "p7"]
        assert rows[1]["num_tokens.json"] == 33
        assert rows[1]["input_ids.json"] == dataset.bits("p2")["input_ids"][:, 0].tolist()
        assert rows[1]["text.txt"] == to_text(rows[1]["input_ids.json"])
        assert not [name for name in rows[0] if "bf16" in name]
        assert len(list(load_dataset(str(dataset.root), **options))) == len(dataset.keys)
    rows = load_dataset(str(dataset.root), split="train", streaming=True)
    assert rows.features["final.bf16.npy"].dtype == "uint16"
    assert_all_samples([decode(row) for row in rows], dataset)
    assert next(iter(rows))["final.bf16.npy"].dtype == np.uint16


def test_without_the_card_the_preview_is_not_mixed_into_the_dataset(tmp_path: Path):
    dataset = make_readable(tmp_path)
    write_preview(dataset.root, PreviewSettings(num_samples=4))
    dataset.folder.card.unlink()
    rows = load_dataset(str(dataset.root), split="train", streaming=True)
    assert sorted(row["__key__"] for row in rows) == sorted(dataset.keys)


def test_a_preview_of_more_than_there_is_holds_every_sample_once(dataset: SyntheticDataset):
    assert write_preview(dataset.root, PreviewSettings(num_samples=100)).num_samples == 3


@pytest.mark.parametrize("num_samples", [0, -1, 1001])
def test_a_number_of_samples_that_is_no_preview_is_refused(dataset: SyntheticDataset, num_samples: int):
    with pytest.raises(UsageError, match=f"preview of {num_samples:,} samples"):
        write_preview(dataset.root, PreviewSettings(num_samples=num_samples))


def test_ids_that_are_no_text_of_their_own_are_kept_as_far_as_text_goes(tmp_path: Path):
    dataset = make_readable(tmp_path, ids={"p0": "öß/1 \n2"})
    write_preview(dataset.root, PreviewSettings(num_samples=1))
    assert members(PreviewFolder(dataset.root).shard)["p0.id.txt"].decode() == "öß/1 \n2"


def test_a_removed_preview_leaves_nothing(dataset: SyntheticDataset):
    before = sorted(path.name for path in dataset.root.rglob("*"))
    write_preview(dataset.root, PreviewSettings(num_samples=1))
    remove_preview(dataset.root)
    remove_preview(dataset.root)
    assert sorted(path.name for path in dataset.root.rglob("*")) == before


def test_verify_takes_a_preview_that_is_the_datasets(dataset: SyntheticDataset):
    write_preview(dataset.root, PreviewSettings(num_samples=2))
    assert verify_dataset(dataset.root).faults == ()


def cut(folder: PreviewFolder) -> None:
    folder.shard.write_bytes(folder.shard.read_bytes()[:-512])


def change(folder: PreviewFolder) -> None:
    content = bytearray(folder.shard.read_bytes())
    content[600] ^= 1
    folder.shard.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "preview/preview-00000.tar: is damaged"),
        (change, "preview/preview-00000.tar: is damaged"),
        (lambda folder: folder.shard.unlink(), "preview/preview-00000.tar: is missing"),
        (lambda folder: folder.record.unlink(), "preview/preview-00000.tar: has no record"),
        (lambda folder: folder.record.write_text("{"), "_index/preview.json: .*not valid JSON"),
        (lambda folder: (folder.root / "preview" / "x.tar").write_bytes(b"x"), "preview/x.tar: is no part"),
    ],
)
def test_verify_names_a_preview_that_is_not(dataset: SyntheticDataset, damage: Damage, message: str):
    write_preview(dataset.root, PreviewSettings(num_samples=2))
    damage(PreviewFolder(dataset.root))
    faults = [str(fault) for fault in verify_dataset(dataset.root).faults]
    assert len(faults) == 1
    assert re.match(message, faults[0]), faults


def test_a_preview_of_another_packing_is_a_fault_and_not_on_the_card(dataset: SyntheticDataset, tmp_path: Path):
    other = make_dataset(tmp_path / "other", lengths=(3, 4))
    record = write_preview(other.root, PreviewSettings(num_samples=2))
    folder = PreviewFolder(dataset.root)
    folder.shard.parent.mkdir()
    folder.shard.write_bytes(PreviewFolder(other.root).shard.read_bytes())
    write_record(folder.record, record)
    assert [message for _, message in preview_faults(dataset.root, dataset.manifest)] == [
        "was taken from another packing; write it anew: eaglehs card --preview N"
    ]
    assert "preview" not in write_card(dataset.root).read_text()
