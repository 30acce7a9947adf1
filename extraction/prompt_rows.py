"""Prompt sources to rows: JSON Lines, Parquet or anything that `datasets` loads, as a stream of plain dicts.

Sources:

    prompts.jsonl, .ndjson, .json    one JSON object a line; a `.json` that is one JSON array is read too
    prompts.parquet                  a row a prompt
    folder/                          a dataset folder: of data files, or one that `save_to_disk` wrote
    org/name                         a dataset on the Hub, split `train`, streamed
    org/name:SPLIT                   another split
    org/name:CONFIG:SPLIT            a config (subset) and a split; `folder/:CONFIG:SPLIT` likewise

Rows are counted from 1; in JSON Lines the number is the line's, blank lines counted and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..schemas.errors import DataError, StorageError, UsageError
from ..schemas.json_text import parse_json

Row = dict[str, Any]
"""One row as its file gives it; extraction/row_content.py makes it a typed record."""

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_FILE_SUFFIXES = (*_JSON_SUFFIXES, ".parquet")
_PARQUET_BATCH_ROWS = 256
_DEFAULT_SPLIT = "train"
_DATASET_FORMS = "org/name, org/name:SPLIT or org/name:CONFIG:SPLIT"
_GZIP = b"\x1f\x8b"
_ONE_OBJECT = "Write one JSON object a line"


class RowError(DataError):
    """A row of a prompt source is not what a row may be; `where` is `file:line`."""

    def __init__(self, where: str, what: str, *, why: str = "", mend: str = "") -> None:
        """Start the message with the place."""
        self.where = where
        super().__init__(f"{where}: {what}", why=why, mend=mend)


def read_rows(source: str) -> Iterator[tuple[int, Row]]:
    """Yield (row number, row) of a source in order, without holding it in memory (but for one JSON array).

    Raises:
        UsageError: no such file, folder or dataset form; an unknown file type, config or split.
        RowError: a line is no JSON object; it is named.
        StorageError: the file or the Hub can't be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _read_file(path)
    name, config, split = _dataset_parts(source)
    return _read_dataset(name, config, split)


def _read_file(path: Path) -> Iterator[tuple[int, Row]]:
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    if path.suffix.lower() in _JSON_SUFFIXES:
        return _read_json_array(path) if _starts_with(path, b"[") else _read_json_lines(path)
    raise UsageError(
        f"{path} has no known file type",
        mend=f"Prompts are read from {', '.join(_FILE_SUFFIXES)} files, folders and datasets of the Hub (org/name)",
    )


def _read_json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield number, _parsed(text, f"{path}:{number}")


def _read_json_array(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as fault:
        raise RowError(str(path), f"starts as a JSON array and is no valid JSON ({fault})") from None
    for number, row in enumerate(rows, start=1):
        yield number, _expect_object(row, f"{path}:{number}")


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            number = 0
            for batch in parquet.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as fault:
        raise StorageError(f"{path} can't be read as Parquet", why=str(fault)[:300]) from None


def _dataset_parts(source: str) -> tuple[str, str | None, str]:
    name, *rest = source.removeprefix("hf://datasets/").split(":")
    is_folder = Path(name).expanduser().is_dir()
    if len(rest) > 2 or not name or not all(rest):
        raise UsageError(f"{source!r} has too many or empty parts", mend=f"Write {_DATASET_FORMS}")
    if not is_folder and (name.count("/") != 1 or name.endswith(_FILE_SUFFIXES) or name[0] in "/.~"):
        raise UsageError(
            f"there is no file or folder {name}, and it is no dataset name of the form org/name",
            mend=f"Give a {', '.join(_FILE_SUFFIXES)} file, a dataset folder, or org/name[:CONFIG][:SPLIT]",
        )
    config = rest[0] if len(rest) == 2 else None
    return name, config, rest[-1] if rest else _DEFAULT_SPLIT


def _read_dataset(name: str, config: str | None, split: str) -> Iterator[tuple[int, Row]]:
    import datasets
    import httpx
    import pyarrow

    rows = _open_dataset(name, config, split)
    number = 0
    try:
        for row in rows:
            number += 1
            yield number, dict(row)
    except (OSError, httpx.HTTPError, datasets.exceptions.DatasetsError, pyarrow.ArrowException) as fault:
        raise StorageError(f"{name} can't be read past row {number}", why=str(fault)[:300]) from None


def _open_dataset(name: str, config: str | None, split: str) -> Any:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    folder = Path(name).expanduser()
    where = str(folder) if folder.is_dir() else name
    try:
        if folder.is_dir() and ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
            return _saved_split(datasets.load_from_disk(where), where, split)
        # streamed: `--limit 100` of a dataset of a terabyte fetches its first file only
        return datasets.load_dataset(where, config, split=split, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, HfHubHTTPError, ConnectionError) as fault:
        raise StorageError(
            f"dataset {name} can't be opened",
            why=str(fault)[:300],
            mend="Check the name and the network, and for a private dataset that you are logged in: hf auth login",
        ) from None
    except (ValueError, FileNotFoundError) as fault:  # unknown config or split, or a folder without data files
        raise UsageError(
            f"dataset {name} has no config {config or 'default'!r} with split {split!r} that can be read",
            why=str(fault)[:300],
            mend=f"Write {_DATASET_FORMS}",
        ) from None


def _saved_split(saved: Any, where: str, split: str) -> Any:
    if not isinstance(saved, dict):
        return saved
    if split not in saved:
        raise UsageError(
            f"{where} has no split {split!r}; it has {', '.join(sorted(saved))}", mend=f"Write {where}:SPLIT"
        )
    return saved[split]


def _parsed(line: bytes, where: str) -> Row:
    if line.startswith(_GZIP):
        raise RowError(where, "compressed by gzip", mend="Unpack it first: gunzip")
    try:
        value = parse_json(line.decode())  # bytes would let json guess UTF-16, whose line ends are not ours
    except UnicodeDecodeError as fault:
        raise RowError(
            where, f"not UTF-8 text (byte {line[fault.start]:#04x} at {fault.start})", mend="Save the file as UTF-8"
        ) from None
    except ValueError as fault:
        raise RowError(where, f"not valid JSON ({fault})", mend=_ONE_OBJECT) from None
    return _expect_object(value, where)


def _expect_object(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise RowError(where, f"expected a JSON object, found {type(value).__name__}", mend=_ONE_OBJECT)
    return value


def _starts_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as content:
        return content.read(256).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(mark)
