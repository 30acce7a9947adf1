"""A row of any reader to tensors, bit for bit: stock `datasets`, `webdataset`, or the raw members of a shard.

The states come as uint16 numbers that are the bits of bfloat16 (numpy has no bfloat16). Seen as bfloat16 they are free
and exact; anything that computed with the numbers on the way is refused with the reason, since a state that was cast
can't be told from a right one later. Of a dataset with a codec they come as the bytes of their members, which are
decoded here, block beside block.

Shape legend: T tokens, H hidden width.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..schemas.counts import counted
from ..schemas.errors import DataError
from ..schemas.sample import META_MEMBER
from ..schemas.states import (
    BITS_SUFFIX,
    FINAL,
    INPUT_IDS,
    LOSS_MASK,
    PLANES_SUFFIX,
    Codec,
    is_state_name,
    state_member,
)
from .planes_read import decode_member
from .worker_count import decode_threads

DecodedSample = dict[str, Any]
"""`key` str, `input_ids` int32 [T], `loss_mask` uint8 [T], and each state, `layer_<k>` and `final`, bfloat16 [T, H]."""

_BITS: np.dtype[Any] = np.dtype("<u2")
_DTYPES: dict[str, np.dtype[Any]] = {INPUT_IDS: np.dtype("<i4"), LOSS_MASK: np.dtype("|u1")}


class ColumnError(DataError):
    """A column of a row is not what the shard holds: absent, cast, or of another shape."""

    def __init__(self, column: str, what: str, *, why: str = "", mend: str = "") -> None:
        """`column` is the name in the row, such as `layer_3.bf16.npy`."""
        self.column = column
        super().__init__(f"{column}: {what}", why=why, mend=mend)


def decode(sample: Mapping[str, Any]) -> DecodedSample:
    """Return the tensors of one row: what `DecodedSample` says, for the arrays that the row has.

    Takes a row of stock `datasets` (streaming or not, features declared or guessed), a sample of `webdataset` with or
    without `.decode()`, and either of them after a `DataLoader`. Other columns are left alone. States share memory
    with the row where it is writable; read-only memory and bytes are copied. `key` is "" where the row names none.

    Raises:
        ColumnError: a column was cast or cut, lacks a value, or differs in length from the others; it is named.
        CodedBlockError, PlanesHeadError: a coded state is cut or damaged; shard, sample and column are named.
        DataError: the row has none of our columns.
    """
    columns = dict(_columns(sample))
    arrays = {name: _tensor(name, column, sample) for name, column in columns.items()}
    if not arrays:
        raise DataError(
            f"no sample of eaglehs: the row has columns {', '.join(map(str, list(sample)[:8])) or '(none)'}",
            why="Expected input_ids.npy, loss_mask.npy, layer_<k>.bf16.npy and final.bf16.npy, or .bf16.planes",
        )
    _check_lengths(arrays, columns)
    return {"key": _key(sample), **arrays}


def column_of(array: str, codec: Codec = Codec.PLAIN) -> str:
    """Return the column in which stock readers have an array: `layer_3` stands in `layer_3.bf16.npy`."""
    return state_member(array, codec) if is_state_name(array) else f"{array}.npy"


def is_decoded(sample: Mapping[str, Any]) -> bool:
    """Tell whether `sample` has the form that `decode` returns."""
    return any(name in sample for name in (INPUT_IDS, LOSS_MASK, FINAL)) or any(map(is_state_name, sample))


def _columns(sample: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for column in sample:
        if column in (f"{INPUT_IDS}.npy", f"{LOSS_MASK}.npy"):
            yield column.removesuffix(".npy"), column
            continue
        for suffix in (BITS_SUFFIX, PLANES_SUFFIX):
            if column.endswith(suffix) and is_state_name(column.removesuffix(suffix)):
                yield column.removesuffix(suffix), column


def _tensor(name: str, column: str, sample: Mapping[str, Any]) -> torch.Tensor:
    value = sample[column]
    if column.endswith(PLANES_SUFFIX):
        return _decoded(column, sample)
    is_state = is_state_name(name)
    dtype = _DTYPES.get(name, _BITS)
    if isinstance(value, torch.Tensor) and is_state and value.dtype == torch.bfloat16:
        return _shaped(column, value, is_state=True)
    array = _array(column, value, dtype)
    if array.dtype != dtype:
        raise _cast_error(column, array.dtype, dtype)
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return _shaped(column, tensor.view(torch.bfloat16) if is_state else tensor, is_state=is_state)


def _decoded(column: str, sample: Mapping[str, Any]) -> torch.Tensor:
    value = sample[column]
    if value is None:
        raise _absent(column)
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ColumnError(
            column,
            f"a value of type {type(value).__name__}, expected bytes",
            mend="Read the shard's columns as they are stored: without with_format and without a cast",
        )
    where = f"{column} of sample {_key(sample) or '(without a key)'}"
    if shard := sample.get("__url__"):
        where = f"{shard}: {where}"
    return torch.from_numpy(decode_member(value, where=where, threads=decode_threads())).view(torch.bfloat16)


def _absent(column: str) -> ColumnError:
    return ColumnError(column, "the sample has no such member", why="Its shard is damaged, or not of this dataset")


def _array(column: str, value: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if value is None:
        raise _absent(column)
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise ColumnError(column, "bfloat16 numbers where whole numbers belong")
        array: np.ndarray[Any, Any] = value.numpy()
        return array
    if isinstance(value, bytes | bytearray | memoryview):
        return _array_of_member(column, bytes(value))
    if isinstance(value, list | tuple):
        return _array_of_rows(column, value, dtype)
    raise ColumnError(column, f"a value of type {type(value).__name__}, expected an array")


def _array_of_member(column: str, content: bytes) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as fault:
        raise ColumnError(column, f"its bytes are no .npy array ({fault})") from None
    return array


def _array_of_rows(column: str, rows: list[Any] | tuple[Any, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return guessed types as an array: a list of row arrays, or nested lists of plain numbers."""
    if not rows:
        raise ColumnError(column, "no rows")
    try:
        if isinstance(rows[0], torch.Tensor):
            return torch.stack(list(rows)).numpy()
        array = np.asarray(rows)
    except (ValueError, TypeError, RuntimeError):
        raise ColumnError(column, "rows of different lengths or types") from None
    if isinstance(rows[0], np.ndarray) or array.dtype.kind not in "iu":
        return array
    limits = np.iinfo(dtype)
    if array.min() < limits.min or array.max() > limits.max:
        raise ColumnError(column, f"numbers out of {dtype.name}'s range")
    return array.astype(dtype)  # plain Python numbers have no type of their own: nothing was cast


def _cast_error(column: str, found: np.dtype[Any], expected: np.dtype[Any]) -> ColumnError:
    what = f"{found.name} values, expected {expected.name}"
    if found.kind == "f":
        return ColumnError(
            column,
            what,
            why="The bits were taken for numbers and converted: NaNs, signed zeros and the states themselves are lost",
            mend="Read the shards again without a cast; `.bf16.npy` columns are to be viewed as bfloat16, never cast",
        )
    if found == np.int64:
        return ColumnError(
            column,
            what,
            why='with_format("torch") and with_format("numpy") of `datasets` widen integers to four times the memory',
            mend="Leave with_format out: rows then hold numpy arrays of the stored types, which this function takes",
        )
    return ColumnError(column, what, mend="Read the shard's columns as they are stored")


def _shaped(column: str, tensor: torch.Tensor, *, is_state: bool) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if is_state and len(shape) == 2:
        return tensor
    if not is_state and len(shape) == 2 and shape[1] == 1:
        return tensor[:, 0]
    if not is_state and len(shape) == 1:
        return tensor
    raise ColumnError(column, f"shape {list(shape)}, expected {'[T, H]' if is_state else '[T, 1]'}")


def _check_lengths(arrays: Mapping[str, torch.Tensor], columns: Mapping[str, str]) -> None:
    first, T = next((name, len(tensor)) for name, tensor in arrays.items())
    for name, tensor in arrays.items():
        if len(tensor) != T:
            raise ColumnError(
                columns[name],
                f"{counted(len(tensor), 'row')}, but {columns[first]} has {T:,}",
                why="Rows of one sample belong together; something cut one array without the others",
            )


def _key(sample: Mapping[str, Any]) -> str:
    meta = sample.get(META_MEMBER)
    key = sample.get("__key__") or (meta.get("key") if isinstance(meta, Mapping) else None)
    return str(key) if key else ""
