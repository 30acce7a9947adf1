"""Writes and reads `_index/samples.parquet` (schemas/index.py): a row a sample, the same rows always the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ..schemas.errors import RecordError
from ..schemas.index import INDEX_KIND, INDEX_VERSION, ArrayPlace, IndexRow
from ..schemas.states import INPUT_IDS, LOSS_MASK, is_state_name, state_names

_GROUP_ROWS = 10_000
"""Rows of a row group: all samples of the reference run in one, and bounded memory for larger ones."""

_TEXTS = ("shard", "key", "id", "source")
_COUNTS = ("num_tokens", "num_trainable", "next_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """What stands in the head of an index file."""

    arrays: tuple[str, ...]
    """Names, in member order."""

    num_rows: int
    metadata: dict[str, str]
    """Key-value metadata other than kind, version and Arrow's own."""


def index_schema(layers: Iterable[int], metadata: Mapping[str, str] | None = None) -> pa.Schema:
    """Return the columns of an index of these layers."""
    fields = [pa.field(name, pa.string(), nullable=False) for name in _TEXTS]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in _COUNTS]
    for array in (INPUT_IDS, LOSS_MASK, *state_names(layers)):
        fields.append(pa.field(f"{array}.offset", pa.int64(), nullable=False))
        fields.append(pa.field(f"{array}.length", pa.int64(), nullable=False))
        fields.append(pa.field(f"{array}.xxh3_128", pa.string(), nullable=False))
    head = {"eaglehs.kind": INDEX_KIND, "eaglehs.version": str(INDEX_VERSION), **(metadata or {})}
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
    found = (metadata.pop("eaglehs.kind", None), metadata.pop("eaglehs.version", None))
    if found != (INDEX_KIND, str(INDEX_VERSION)):
        raise RecordError(f"is of kind and version {found}, expected {INDEX_KIND} {INDEX_VERSION}", where=str(path))
    metadata.pop("ARROW:schema", None)
    return IndexFile(arrays=_arrays(path, schema), num_rows=num_rows, metadata=metadata)


def read_index(path: Path) -> Iterator[IndexRow]:
    """Yield the rows of an index file in shard order, a few thousand in memory at a time.

    Raises:
        RecordError: missing, damaged, of another kind or version, or with other columns.
    """
    arrays = read_index_head(path).arrays
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield _row(row, arrays)
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
    return RecordError(f"can't be read: {str(fault)[:200]}", where=str(path), why="It was cut or damaged")


def _arrays(path: Path, schema: pa.Schema) -> tuple[str, ...]:
    arrays = tuple(name.removesuffix(".offset") for name in schema.names if name.endswith(".offset"))
    layers = [int(name.removeprefix("layer_")) for name in arrays if is_state_name(name) and name != "final"]
    wanted = index_schema(layers)
    if schema.names != wanted.names or schema.types != wanted.types:
        raise RecordError(f"has columns {json.dumps(schema.names)[:200]}, not those of an index", where=str(path))
    return arrays


def _flat(row: IndexRow) -> dict[str, object]:
    flat: dict[str, object] = {name: getattr(row, name) for name in (*_TEXTS, *_COUNTS)}
    for array, place in row.arrays.items():
        flat[f"{array}.offset"] = place.offset
        flat[f"{array}.length"] = place.length
        flat[f"{array}.xxh3_128"] = place.xxh3_128
    return flat


def _row(flat: dict[str, object], arrays: tuple[str, ...]) -> IndexRow:
    places = {
        array: ArrayPlace(
            offset=flat[f"{array}.offset"],  # type: ignore[arg-type]  # the schema was compared
            length=flat[f"{array}.length"],  # type: ignore[arg-type]
            xxh3_128=flat[f"{array}.xxh3_128"],  # type: ignore[arg-type]
        )
        for array in arrays
    }
    return IndexRow(arrays=places, **{name: flat[name] for name in (*_TEXTS, *_COUNTS)})  # type: ignore[arg-type]
