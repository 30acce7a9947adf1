"""Reads `run/prompts.parquet` in small batches; token ids and masks go to an unlinked file, not to memory.

A prompt set of a million samples is some GB of ids. The table keeps per sample only its names and counts, and reads
one prompt's ids and mask back when they are asked for, from any thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..schemas.counts import counted
from ..schemas.errors import RecordError
from ..schemas.keys import is_key
from ..schemas.prompt import PROMPTS_KIND, PROMPTS_VERSION, Prompt
from .plan import PlannedSample

_BATCH_ROWS = 512
_COLUMNS = {
    "key": pa.string(),
    "id": pa.string(),
    "source": pa.string(),
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.uint8()),
}
_ID_BYTES = 4
_TOKEN_BYTES = _ID_BYTES + 1

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]


class PromptTable:
    """All prompts of a run, in order. Close it, or use it in a `with`."""

    def __init__(self, path: Path, *, vocab_size: int, spill: Path | None = None) -> None:
        """Read and check the file; `spill` is the folder of the unlinked file, default the system's for such files.

        Raises:
            RecordError: not such a file, or a row with a bad key, empty, with ids outside the vocabulary or a mask
                that does not fit.
        """
        self.path = path
        self.keys: list[str] = []
        self.ids: list[str] = []
        self.sources: list[str] = []
        self._vocab_size = vocab_size
        self._num_tokens: list[int] = []
        self._num_trainable: list[int] = []
        self._starts: list[int] = []
        self._rows: dict[str, int] = {}
        self._file: BinaryIO = tempfile.TemporaryFile(dir=spill, prefix=".prompts-")  # noqa: SIM115 - closed by close()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PromptTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the unlinked file."""
        self._file.close()

    def __len__(self) -> int:
        """Prompts."""
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._num_tokens)

    @property
    def num_trainable(self) -> int:
        """Tokens of all prompts with mask 1."""
        return sum(self._num_trainable)

    def planned(self) -> list[PlannedSample]:
        """Return what the plan needs of each prompt, in order."""
        rows = zip(self.keys, self.ids, self.sources, self._num_tokens, strict=True)
        return [PlannedSample(key=key, id=id_, source=source, num_tokens=n) for key, id_, source, n in rows]

    def lengths(self) -> Sequence[int]:
        """Return the tokens of each prompt, in order."""
        return self._num_tokens

    def prompt(self, key: str) -> Prompt:
        """Return one prompt with its ids (int32 [T]) and mask (uint8 [T])."""
        row = self._rows[key]
        num_tokens = self._num_tokens[row]
        content = os.pread(self._file.fileno(), num_tokens * _TOKEN_BYTES, self._starts[row])
        return Prompt(
            key=key,
            id=self.ids[row],
            source=self.sources[row],
            input_ids=cast("Sequence[int]", np.frombuffer(content, dtype="<i4", count=num_tokens)),
            loss_mask=cast("Sequence[int]", np.frombuffer(content, dtype="|u1", offset=num_tokens * _ID_BYTES)),
        )

    def key_of_id(self, sample_id: str) -> str | None:
        """Return the key of the first prompt with the user's id `sample_id`, or None."""
        return self.keys[self.ids.index(sample_id)] if sample_id in self.ids else None

    def num_trainable_of(self, key: str) -> int:
        """Return the tokens with mask 1 of one prompt."""
        return self._num_trainable[self._rows[key]]

    def _read(self) -> None:
        try:
            with pq.ParquetFile(self.path) as file:
                self._check_schema(file.schema_arrow)
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(_COLUMNS)):
                    self._take(batch)
        except FileNotFoundError:
            raise self._error("is missing", mend="Run `eaglehs extract` again: it makes the run anew") from None
        except PermissionError:
            raise self._error("can't be read: Permission denied", mend="Look at its rights: ls -l") from None
        except (pa.ArrowException, OSError) as fault:
            raise self._error(f"can't be read: {str(fault)[:200]}", why="It was cut or damaged") from None
        self._file.flush()

    def _check_schema(self, schema: pa.Schema) -> None:
        metadata = schema.metadata or {}
        kind, version = metadata.get(b"eaglehs.kind", b"").decode(), metadata.get(b"eaglehs.version", b"").decode()
        if (kind, version) != (PROMPTS_KIND, str(PROMPTS_VERSION)):
            raise self._error(f"is of kind {kind!r} version {version!r}, expected {PROMPTS_KIND!r} {PROMPTS_VERSION}")
        for name, kind_of in _COLUMNS.items():
            found = schema.field(name).type if name in schema.names else None
            if found is None or not _is_like(found, kind_of):
                raise self._error(f"column {name} is {found or 'missing'}, expected {kind_of}")

    def _take(self, batch: pa.RecordBatch) -> None:
        columns = {name: batch.column(name) for name in _COLUMNS}
        names = zip(*(columns[name].to_pylist() for name in ("key", "id", "source")), strict=True)
        for (key, id_, source), ids, mask in zip(names, columns["input_ids"], columns["loss_mask"], strict=True):
            where = f"row {len(self.keys)}"
            if key is None or id_ is None or source is None or ids.values is None or mask.values is None:
                raise self._error(f"{where} has an empty cell")
            self._add(where, (key, id_, source), _numbers(ids), _numbers(mask))

    def _add(self, where: str, names: tuple[str, str, str], ids_T: Ids, mask_T: Mask) -> None:
        key, id_, source = names
        if not is_key(key):
            raise self._error(f"{where}: {key[:80]!r} is not a key")
        if key in self._rows:
            raise self._error(
                f"{where}: key {key} is already that of row {self._rows[key]}", why="Two samples would become one"
            )
        if len(ids_T) == 0 or len(ids_T) != len(mask_T):
            raise self._error(
                f"{where} ({key}): {counted(len(ids_T), 'token id')} and {counted(len(mask_T), 'mask value')}"
            )
        if int(ids_T.min()) < 0 or int(ids_T.max()) >= self._vocab_size:
            worst = int(ids_T.max()) if int(ids_T.min()) >= 0 else int(ids_T.min())
            raise self._error(f"{where} ({key}): token id {worst} is outside the vocabulary of {self._vocab_size}")
        if int(mask_T.max()) > 1:
            raise self._error(f"{where} ({key}): loss mask value {int(mask_T.max())}, expected 0 or 1")
        self._rows[key] = len(self.keys)
        self.keys.append(key)
        self.ids.append(key if id_ == key else id_)  # mostly the same text: held once
        self.sources.append(source)
        self._num_tokens.append(len(ids_T))
        self._num_trainable.append(int(mask_T.sum()))
        self._starts.append(self._file.tell())
        self._file.write(ids_T.astype("<i4", copy=False).tobytes())
        self._file.write(mask_T.tobytes())

    def _error(self, what: str, *, why: str = "", mend: str = "") -> RecordError:
        return RecordError(what, where=str(self.path), why=why, mend=mend)


def _is_like(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    return bool(is_list and found.value_type == wanted.value_type)


def _numbers(cell: pa.Scalar) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = cell.values.to_numpy(zero_copy_only=False)
    return values
