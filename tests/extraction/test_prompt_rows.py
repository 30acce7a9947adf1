"""Rows from JSON Lines, Parquet and dataset folders, with the line in every error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eaglehs.extraction.prompt_rows import RowError, read_rows
from eaglehs.schemas.errors import StorageError, UsageError

ROWS = [{"text": "first"}, {"text": "zweite\u2028Zeile"}, {"text": "日本"}]


def _lines(path: Path, *lines: str) -> str:
    path.write_bytes("\n".join(lines).encode())
    return str(path)


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.ndjson", "P.JSONL"])
def test_json_lines_are_numbered_by_line(tmp_path: Path, name: str):
    source = _lines(tmp_path / name, *(json.dumps(row, ensure_ascii=False) for row in ROWS))
    assert list(read_rows(source)) == list(enumerate(ROWS, start=1))


def test_blank_lines_are_counted_and_left_out(tmp_path: Path):
    source = _lines(tmp_path / "p.jsonl", "\ufeff", '{"text": "a"}', "  ", '{"text": "b"}', "")
    assert [number for number, _ in read_rows(source)] == [2, 4]


def test_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path: Path):
    source = _lines(tmp_path / "p.jsonl", '\ufeff{"text": "a"}\r', '{"text": "b"}\r')
    assert [row["text"] for _, row in read_rows(source)] == ["a", "b"]


def test_one_json_array_is_read_too(tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(ROWS, indent=2))
    assert list(read_rows(str(path))) == list(enumerate(ROWS, start=1))
    path.write_text("[{},")
    with pytest.raises(RowError, match="starts as a JSON array"):
        list(read_rows(str(path)))
    path.write_text("[{}, 5]")
    with pytest.raises(RowError, match=r"sharegpt.json:2: expected a JSON object, found int"):
        list(read_rows(str(path)))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"text": ', "not valid JSON"),
        ("[1]", "found list"),
        ('"a"', "found str"),
        ('{"text": ' + "[" * 100_000, "not valid JSON .it is nested too deeply"),
    ],
    ids=["cut", "list", "text", "deep"],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, fault: str):
    source = _lines(tmp_path / "p.jsonl", '{"text": "a"}', "", line)
    rows = read_rows(source)
    assert next(rows)[0] == 1
    with pytest.raises(RowError, match=fault) as caught:
        next(rows)
    assert caught.value.where == f"{source}:3"


def test_a_line_that_is_no_utf8_is_named(tmp_path: Path):
    (tmp_path / "p.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(RowError, match=r"p.jsonl:1: not UTF-8 text \(byte 0xff at 10\). Save the file as UTF-8"):
        list(read_rows(str(tmp_path / "p.jsonl")))


def test_utf16_is_refused_at_its_first_line_however_many_there_are(tmp_path: Path):
    """Read as bytes, a file of one line was taken, and one of two refused with words about its second half."""
    (tmp_path / "p.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(RowError, match=r"p.jsonl:1: not UTF-8 text \(byte 0xff at 0\)"):
        list(read_rows(str(tmp_path / "p.jsonl")))


def test_a_compressed_file_under_a_plain_name_is_told_as_such(tmp_path: Path):
    (tmp_path / "p.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(RowError, match=r"p.jsonl:1: compressed by gzip. Unpack it first"):
        list(read_rows(str(tmp_path / "p.jsonl")))


def test_rows_come_before_the_rest_of_the_file_is_read(tmp_path: Path):
    source = _lines(tmp_path / "p.jsonl", '{"text": "a"}', "broken")
    assert next(read_rows(source)) == (1, {"text": "a"})


def test_parquet_rows_are_numbered_from_one(tmp_path: Path):
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "a" * i}]} for i in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=100)
    found = list(read_rows(str(tmp_path / "p.parquet")))
    assert [number for number, _ in found] == list(range(1, 601))
    assert [row for _, row in found] == rows


def test_a_file_that_is_no_parquet_is_a_storage_error(tmp_path: Path):
    (tmp_path / "p.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(StorageError, match=r"p.parquet can't be read as Parquet"):
        list(read_rows(str(tmp_path / "p.parquet")))


def test_a_folder_of_data_files_is_a_dataset(tmp_path: Path):
    for split in ("train", "test"):
        _lines(tmp_path / f"{split}.jsonl", json.dumps({"text": split}), json.dumps({"text": "more"}))
    assert [row["text"] for _, row in read_rows(str(tmp_path))] == ["train", "more"]
    assert list(read_rows(f"{tmp_path}:test")) == [(1, {"text": "test"}), (2, {"text": "more"})]
    with pytest.raises(UsageError, match="split 'valid'"):
        list(read_rows(f"{tmp_path}:valid"))


def test_a_saved_dataset_is_read_with_and_without_splits(tmp_path: Path):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "two")
    assert list(read_rows(str(tmp_path / "one"))) == list(enumerate(ROWS, start=1))
    assert list(read_rows(f"{tmp_path / 'two'}:test")) == [(1, ROWS[1])]
    with pytest.raises(UsageError, match="it has test, train"):
        list(read_rows(f"{tmp_path / 'two'}:valid"))


@pytest.mark.parametrize("source", ["missing.jsonl", "some/missing.jsonl", "/no/such/place", "name", "a/b/c", ""])
def test_what_is_neither_file_nor_dataset_name_is_said_so(source: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        list(read_rows(source))


@pytest.mark.parametrize("source", ["org/name:a:b:c", "org/name:", "org/name::b"])
def test_a_dataset_name_with_too_many_or_empty_parts_is_refused(source: str):
    with pytest.raises(UsageError, match="too many or empty parts"):
        list(read_rows(source))


def test_an_unknown_file_type_lists_the_known_ones(tmp_path: Path):
    (tmp_path / "p.csv").touch()
    with pytest.raises(UsageError, match=r"\.jsonl, \.ndjson, \.json, \.parquet"):
        list(read_rows(str(tmp_path / "p.csv")))


def test_a_dataset_that_can_not_be_reached_is_a_storage_error(monkeypatch: Any):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="dataset org/name can't be opened"):
        list(read_rows("org/name"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:test", ("org/name", None, "test")),
        ("org/name:sub:test", ("org/name", "sub", "test")),
        ("hf://datasets/org/name:test", ("org/name", None, "test")),
    ],
)
def test_config_and_split_stand_behind_colons_and_the_hub_is_streamed(source: str, expected: Any, monkeypatch: Any):
    asked: list[Any] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> list[Any]:
        asked.append((name, config, split))
        assert streaming
        return [{"text": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(read_rows(source)) == [(1, {"text": "a"})]
    assert asked == [expected]


def test_a_connection_lost_in_the_middle_says_after_which_row(monkeypatch: Any):
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    found = read_rows("org/name")
    assert next(found) == (1, {"text": "a"})
    with pytest.raises(StorageError, match="org/name can't be read past row 1"):
        next(found)
