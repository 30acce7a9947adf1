"""The index: rows come back as they were, the same rows are the same bytes, and other files are refused."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eaglehs.builder import index_store
from eaglehs.builder.index_store import index_schema, index_table, read_index, read_index_head, write_index
from eaglehs.schemas.atomic import staged
from eaglehs.schemas.errors import RecordError
from eaglehs.schemas.index import ArrayPlace, IndexRow
from hypothesis import given, settings
from hypothesis import strategies as st

LAYERS = (2, 10)
ARRAYS = ("input_ids", "loss_mask", "layer_2", "layer_10", "final")
NUMBERS = st.integers(0, 2**40)


def row(number: int, offset: int = 64) -> IndexRow:
    places = {name: ArrayPlace(offset=offset + i, length=i, xxh3_128=f"{i:032x}") for i, name in enumerate(ARRAYS)}
    return IndexRow(
        shard=f"data/train-{number // 3:05d}.tar",
        key=f"p{number}",
        id=f"Ü {number}",
        source="s:1",
        num_tokens=number + 1,
        num_trainable=number,
        next_token=-1,
        arrays=places,
    )


@pytest.mark.parametrize("name", ["key", "num_tokens", "final.offset"])
def test_a_null_is_refused_by_its_column(tmp_path: Path, name: str):
    table = pq.read_table(write(tmp_path / "a.parquet", [row(0), row(1)]))
    place = table.schema.get_field_index(name)
    nulls = pa.nulls(len(table), table.schema.field(place).type)
    loose = pa.schema([field.with_nullable(True) for field in table.schema], metadata=table.schema.metadata)
    pq.write_table(table.cast(loose).set_column(place, loose.field(place), nulls), tmp_path / "b.parquet")
    with pytest.raises(RecordError, match=f"column {name} has a null"):
        list(read_index(tmp_path / "b.parquet"))


def write(path: Path, rows: list[IndexRow], pieces: int = 1) -> Path:
    schema = index_schema(LAYERS)
    step = -(-len(rows) // pieces) or 1
    with staged(path) as out:
        write_index(out, [index_table(rows[i : i + step], schema) for i in range(0, len(rows), step)], schema)
    return path


@given(st.lists(NUMBERS, max_size=30))
@settings(max_examples=20)
def test_rows_come_back_as_they_were(tmp_path_factory, numbers):
    rows = [row(number, offset=number) for number in numbers]
    path = write(tmp_path_factory.mktemp("index") / "i", rows)
    assert list(read_index(path)) == rows
    head = read_index_head(path)
    assert (head.arrays, head.num_rows, head.metadata) == (ARRAYS, len(rows), {})


def test_the_bytes_do_not_depend_on_the_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(index_store, "_GROUP_ROWS", 10)
    rows = [row(number) for number in range(37)]
    files = [write(tmp_path / str(pieces), rows, pieces).read_bytes() for pieces in (1, 2, 5, 37)]
    assert len(set(files)) == 1
    assert list(read_index(tmp_path / "5")) == rows
    assert pq.ParquetFile(tmp_path / "1").num_row_groups == 4


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "i"
    with pytest.raises(RecordError, match="is missing"):
        read_index_head(path)
    write(path, [row(1)])
    whole, good = path.read_bytes(), pq.read_table(path)
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(RecordError):
            list(read_index(path))
    pq.write_table(good.replace_schema_metadata({"eaglehs.kind": "eaglehs.index", "eaglehs.version": "3"}), path)
    with pytest.raises(RecordError, match=r"eaglehs\.index of 1 or 2"):
        list(read_index(path))
    pq.write_table(good.drop_columns(["final.length"]), path)
    with pytest.raises(RecordError, match="not those of an index"):
        list(read_index(path))
    pq.write_table(good.append_column("more", pa.array([1])), path)
    with pytest.raises(RecordError, match="not those of an index"):
        list(read_index(path))
