"""Opening a dataset: what is lost is named or made good, what does not belong together is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder.catalog import DatasetMismatchError, MissingShardError, open_catalog
from eaglehs.builder.index_store import index_schema, index_table, read_index, write_index
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.errors import DataError, RecordError, UsageError
from eaglehs.schemas.index import IndexRow

from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.runs import make_run


def rewrite_index(dataset: SyntheticDataset, rows: list[IndexRow]) -> None:
    schema = index_schema(dataset.manifest.layers)
    with dataset.folder.index.open("wb") as out:
        write_index(out, [index_table(rows, schema)], schema)


def test_the_catalog_has_every_sample_in_shard_order(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    catalog = open_catalog(dataset.root)
    assert [row.key for row in catalog.rows] == dataset.keys
    assert catalog.manifest == dataset.manifest
    assert catalog.shard_path(catalog.rows[0]) == dataset.shards[0]


def test_a_lost_index_is_made_good_from_the_shards_headers(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    rows = open_catalog(str(dataset.root)).rows
    dataset.folder.index.unlink()
    with pytest.warns(UserWarning, match=r"samples\.parquet is missing: the headers of 2 shards are scanned"):
        assert open_catalog(dataset.root).rows == rows


def test_a_damaged_index_is_not_taken_for_a_lost_one(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    dataset.folder.index.write_bytes(dataset.folder.index.read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"samples\.parquet"):
        open_catalog(dataset.root)


def test_a_missing_shard_is_named(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    dataset.shards[1].unlink()
    with pytest.raises(MissingShardError, match=r"train-00001\.tar is missing; the manifest lists 2 shards"):
        open_catalog(dataset.root)


def test_a_shard_that_the_manifest_does_not_list_is_named(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    (dataset.folder.data / "train-00007.tar").write_bytes(dataset.shards[0].read_bytes())
    with pytest.raises(MissingShardError, match=r"train-00007\.tar is in the folder.* mix in samples"):
        open_catalog(dataset.root)


def test_a_part_file_of_a_pack_that_goes_on_is_no_shard(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    (dataset.folder.data / ".train-00007.tar.123.part").write_bytes(b"half")
    assert len(open_catalog(dataset.root).rows) == 3


@pytest.mark.parametrize("change", [-512, 512])
def test_a_shard_of_another_size_is_refused_with_both_sizes(tmp_path: Path, change: int):
    dataset = make_dataset(tmp_path)
    content = dataset.shards[0].read_bytes()
    dataset.shards[0].write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(
        DatasetMismatchError, match=f"has {len(content) + change:,} bytes, the manifest says {len(content):,}"
    ):
        open_catalog(dataset.root)


def test_the_index_of_another_dataset_is_refused(tmp_path: Path):
    dataset, other = make_dataset(tmp_path / "a"), make_dataset(tmp_path / "b", lengths=(5, 12, 34))
    dataset.folder.index.write_bytes(other.folder.index.read_bytes())
    with pytest.raises(
        DatasetMismatchError, match=r"1 sample of 34 tokens in the index, 1 sample of 33 .*in the manifest"
    ):
        open_catalog(dataset.root)


def test_an_index_that_lacks_a_shard_is_refused(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    rewrite_index(dataset, list(read_index(dataset.folder.index))[:2])
    with pytest.raises(DatasetMismatchError, match=r"train-00001\.tar has nothing in the index"):
        open_catalog(dataset.root)


def test_a_sample_that_stands_twice_in_the_index_is_refused(tmp_path: Path):
    dataset = make_dataset(tmp_path, lengths=(5, 5))
    first, _ = read_index(dataset.folder.index)
    rewrite_index(dataset, [first, first])
    with pytest.raises(DatasetMismatchError, match="sample p0 stands twice"):
        open_catalog(dataset.root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 192}, "final of sample p0 has 192 bytes for 5 tokens, 32 a token"),
        ({"offset": 65}, r"at byte 65 of data/train-00000\.tar can't be"),
        ({"offset": 64 * 10**6}, "can't be"),
    ],
)
def test_a_place_that_can_not_be_is_refused(tmp_path: Path, change: dict, message: str):
    dataset = make_dataset(tmp_path, lengths=(5,))
    (row,) = read_index(dataset.folder.index)
    rewrite_index(dataset, [replace(row, arrays=row.arrays | {"final": replace(row.arrays["final"], **change)})])
    with pytest.raises(DatasetMismatchError, match=message):
        open_catalog(dataset.root)


@pytest.mark.parametrize("options", [{"layers": (2, 5, 8)}, {"hidden_size": 8}])
def test_shards_of_other_layers_or_another_width_are_refused(tmp_path: Path, options: dict):
    dataset, other = make_dataset(tmp_path / "a"), make_dataset(tmp_path / "b", **options)
    shards = tuple(
        replace(entry, size_bytes=path.stat().st_size)
        for entry, path in zip(other.manifest.shards, other.shards, strict=True)
    )
    write_record(other.folder.manifest, replace(dataset.manifest, shards=shards))
    with pytest.raises(DatasetMismatchError, match="the manifest"):
        open_catalog(other.root)


def test_without_an_index_shards_of_other_layers_are_refused_too(tmp_path: Path):
    dataset, other = make_dataset(tmp_path / "a"), make_dataset(tmp_path / "b", layers=(2, 5, 8))
    write_record(other.folder.manifest, replace(dataset.manifest, shards=other.manifest.shards))
    other.folder.index.unlink()
    with pytest.warns(UserWarning, match="scanned"), pytest.raises(DataError, match=r"lacks layer_9\.bf16\.npy"):
        open_catalog(other.root)


def test_the_fingerprint_is_the_manifests(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    before = open_catalog(dataset.root).fingerprint
    assert open_catalog(dataset.root).fingerprint == before
    write_record(dataset.folder.manifest, replace(dataset.manifest, run_id="ffffffff"))
    assert open_catalog(dataset.root).fingerprint != before


def test_a_run_is_told_from_a_dataset(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"is a run, not a dataset.*eaglehs pack"):
        open_catalog(run.root)


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no manifest\.json"):
        open_catalog(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        open_catalog(tmp_path / "nothing" / "here")


def test_a_manifest_of_a_newer_version_names_the_way_out(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    manifest = json.loads(dataset.folder.manifest.read_text())
    dataset.folder.manifest.write_text(json.dumps(manifest | {"version": 3}))
    with pytest.raises(RecordError, match="pip install -U eaglehs"):
        open_catalog(dataset.root)
