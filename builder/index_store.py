"""Writes and reads `_index/samples.parquet` (schemas/index.py): a row a sample, the same rows always the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ..schemas.errors import RecordError
from ..schemas.index import (
    CODED_INDEX_VERSION,
    INDEX_KIND,
    PLAIN_INDEX_VERSION,
    ArrayPlace,
    CodedForm,
    IndexRow,
)
from ..schemas.states import INPUT_IDS, LOSS_MASK, Codec, is_state_name, layers_of, state_names

_GROUP_ROWS = 10_000
"""Rows of a row group: all samples of the reference run in one, and bounded memory for larger ones."""

_TEXTS = ("shard", "key", "id", "source")
_COUNTS = ("num_tokens", "num_trainable", "next_token")
_PLACE = {"offset": pa.int64(), "length": pa.int64(), "xxh3_128": pa.string()}
_CODED = {"codec": pa.string(), "coded_length": pa.int64(), "dtype": pa.string(), "width": pa.int64()}
_VERSIONS = {str(PLAIN_INDEX_VERSION): False, str(CODED_INDEX_VERSION): True}
"""Version -> whether states are coded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """What stands in the head of an index file."""

    arrays: tuple[str, ...]
    """Names, in member order."""

    is_coded: bool
    """Whether it is of a dataset with a codec: version 2."""

    num_rows: int
    metadata: dict[str, str]
    """Key-value metadata other than kind, version and Arrow's own."""


def index_schema(
    layers: Iterable[int], metadata: Mapping[str, str] | None = None, *, is_coded: bool = False
) -> pa.Schema:
    """Return the columns of an index of these layers, of version 2 where states are coded."""
    fields = [pa.field(name, pa.string(), nullable=False) for name in _TEXTS]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in _COUNTS]
    for array in (INPUT_IDS, LOSS_MASK, *state_names(layers)):
        fields += [pa.field(f"{array}.{name}", kind, nullable=False) for name, kind in _PLACE.items()]
        if is_coded and is_state_name(array):
            fields += [pa.field(f"{array}.{name}", kind, nullable=False) for name, kind in _CODED.items()]
    version = CODED_INDEX_VERSION if is_coded else PLAIN_INDEX_VERSION
    head = {"eaglehs.kind": INDEX_KIND, "eaglehs.version": str(version), **(metadata or {})}
    return pa.schema(fields, metadata=head)


def index_table(rows: Sequence[IndexRow], schema: pa.Schema) -> pa.Table:
    """Return rows as a table of `index_schema`."""
    return pa.Table.from_pylist([_flat(row) for row in rows], schema=schema)


def write_index(out: BinaryIO, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Write tables one after another as one file, in row groups that do not depend on how they came."""
    waiting: list[pa.Table] = []
    with pq.ParquetWriter(out, schema, compression="zstd", version="2.6") as writer:
        for table in tables:
            waiting.append(table.replace_schema_metadata(schema.metadata))
            while sum(len(part) for part in waiting) >= _GROUP_ROWS:
                whole = pa.concat_tables(waiting).combine_chunks()
                writer.write_table(whole.slice(0, _GROUP_ROWS), row_group_size=_GROUP_ROWS)
                waiting = [whole.slice(_GROUP_ROWS)]
        rest = pa.concat_tables(waiting).combine_chunks() if waiting else schema.empty_table()
        if len(rest):
            writer.write_table(rest, row_group_size=_GROUP_ROWS)


def read_index_head(path: Path) -> IndexFile:
    """Return the arrays, row count and metadata of an index file.

    Raises:
        RecordError: missing, damaged, of another kind or version, or with other columns.
    """
    try:
        with pq.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except FileNotFoundError:
        raise RecordError("is missing", where=str(path)) from None
    except (pa.ArrowException, OSError) as fault:
        raise _damaged(path, fault) from None
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    kind, version = metadata.pop("eaglehs.kind", None), metadata.pop("eaglehs.version", "")
    if kind != INDEX_KIND or version not in _VERSIONS:
        raise RecordError(
            f"is of kind and version {(kind, version)}, expected {INDEX_KIND} of {' or '.join(_VERSIONS)}",
            where=str(path),
        )
    metadata.pop("ARROW:schema", None)
    arrays = _arrays(path, schema, is_coded=_VERSIONS[version])
    return IndexFile(arrays=arrays, is_coded=_VERSIONS[version], num_rows=num_rows, metadata=metadata)


def read_index(path: Path) -> Iterator[IndexRow]:
    """Yield the rows of an index file in shard order, a few thousand in memory at a time.

    Raises:
        RecordError: missing, damaged, of another kind or version, or with other columns.
    """
    arrays = read_index_head(path).arrays
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                _check_filled(batch, path)
                for row in batch.to_pylist():
                    yield _row(row, arrays, path)
    except (pa.ArrowException, OSError) as fault:
        raise _damaged(path, fault) from None


def read_index_table(path: Path) -> pa.Table:
    """Return a small index file whole, as a table.

    Raises:
        RecordError: missing, damaged, of another kind or version, or with other columns.
    """
    read_index_head(path)
    try:
        return pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as fault:
        raise _damaged(path, fault) from None


def _damaged(path: Path, fault: Exception) -> RecordError:
    if isinstance(fault, PermissionError):
        return RecordError("can't be read: Permission denied", where=str(path), mend="Look at its rights: ls -l")
    return RecordError(f"can't be read: {str(fault)[:200]}", where=str(path), why="It was cut or damaged")


def _check_filled(batch: pa.RecordBatch, path: Path) -> None:
    """Refuse what an index written by another program may hold: a cell of nothing."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            raise RecordError(
                f"column {name} has a null", where=str(path), why="No pack writes one", mend="Copy the dataset again"
            )


def _arrays(path: Path, schema: pa.Schema, *, is_coded: bool) -> tuple[str, ...]:
    arrays = tuple(name.removesuffix(".offset") for name in schema.names if name.endswith(".offset"))
    wanted = index_schema(layers_of(arrays), is_coded=is_coded)
    if schema.names != wanted.names or schema.types != wanted.types:
        raise RecordError(f"has columns {json.dumps(schema.names)[:200]}, not those of an index", where=str(path))
    return arrays


def _flat(row: IndexRow) -> dict[str, object]:
    flat: dict[str, object] = {name: getattr(row, name) for name in (*_TEXTS, *_COUNTS)}
    for array, place in row.arrays.items():
        flat |= {f"{array}.{name}": getattr(place, name) for name in _PLACE}
        if place.coded is not None:
            form = place.coded
            values = (str(form.codec), form.length, form.dtype, form.width)
            flat |= {f"{array}.{name}": value for name, value in zip(_CODED, values, strict=True)}
    return flat


def _row(flat: dict[str, object], arrays: tuple[str, ...], path: Path) -> IndexRow:
    places = {array: _place(flat, array, path) for array in arrays}
    return IndexRow(arrays=places, **{name: flat[name] for name in (*_TEXTS, *_COUNTS)})  # type: ignore[arg-type]


def _place(flat: dict[str, Any], array: str, path: Path) -> ArrayPlace:
    place = {name: flat[f"{array}.{name}"] for name in _PLACE}
    if f"{array}.codec" not in flat:
        return ArrayPlace(**place)
    codec, length, dtype, width = (flat[f"{array}.{name}"] for name in _CODED)
    if codec not in list(Codec):
        raise RecordError(f"{array} of {flat['key']} has the codec {codec!r}, unknown to this eaglehs", where=str(path))
    return ArrayPlace(**place, coded=CodedForm(codec=Codec(codec), length=length, dtype=dtype, width=width))
