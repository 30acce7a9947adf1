"""Whether the bits of a state can be what a model computed, found in one pass over blocks of rows.

T tokens, H hidden width. Bits are bfloat16 seen as uint16: sign, 8 bits of exponent, 7 of mantissa. Infinity is 0x7F80,
NaN is above it. Seen as int16 all positive patterns are in order, and as uint16 all negative ones, so two maxima find
every value that is not finite without a temporary array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ..schemas.counts import counted
from ..schemas.states import layer_state

Bits = npt.NDArray[np.uint16]

_INFINITY = 0x7F80
_NEGATIVE_INFINITY = 0xFF80
_MAGNITUDE = np.uint16(0x7FFF)

NUM_NORM_ROWS = 64
"""Rows, evenly spaced, whose L2 norms are averaged for the report: enough to show a wrong or dead layer."""

_HEAD = 4
"""Leading values of a row that are compared first, as one number of 64 bits; the rest only where these are equal."""

_HEAD_MAGNITUDE = np.uint64(0x7FFF_7FFF_7FFF_7FFF)

_MIN_WIDTH = 32
"""From this width on, equal rows are no chance: below it only a state with most rows equal is refused."""

_EMBEDDINGS = layer_state(0)
"""What enters layer 0 depends on the token alone: unused tokens may share a row, padding tokens may have zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFault:
    """Why a state can't be right."""

    row: int | None
    """The first row that shows it; None where all do."""

    message: str


class StateCheck:
    """The checks of one state of one sample, fed block by block in row order."""

    def __init__(self, name: str, ids_T: npt.NDArray[np.int32]) -> None:
        """`name` is `layer_<k>` or `final`; `ids_T` are the sample's token ids."""
        self._name = name
        self._ids_T = ids_T
        self._hash = xxhash.xxh3_128()
        self._norm_rows = norm_rows(len(ids_T))
        self._norms: list[float] = []
        self._rows_seen = 0
        self._last_row: Bits | None = None
        self._level: int | None = None
        self._is_level = True
        self._not_finite: StateFault | None = None
        self._zero_row: int | None = None
        self._equal_rows: list[int] = []
        self._num_equal = 0
        self._width = 0

    def update(self, bits_NH: Bits) -> None:
        """Take the next rows; a C-contiguous block, which is not kept."""
        self._hash.update(bits_NH.data)
        self._width = bits_NH.shape[1]
        self._look_for_level(bits_NH)
        if self._not_finite is None:
            self._look_for_not_finite(bits_NH)
        self._look_at_rows(bits_NH)
        self._take_norms(bits_NH)
        self._rows_seen += len(bits_NH)
        self._last_row = bits_NH[-1].copy()

    @property
    def xxh3_128(self) -> str:
        """The hash of all rows so far, as 32 hex digits."""
        return str(self._hash.hexdigest())

    @property
    def mean_norm(self) -> float:
        """The mean L2 norm of up to 64 evenly spaced rows."""
        return float(np.mean(self._norms)) if self._norms else 0.0

    def faults(self) -> Iterator[StateFault]:
        """Yield what is wrong with the rows so far, the gravest first."""
        if self._not_finite is not None:
            yield self._not_finite
        if self._is_level and self._level == 0:
            yield StateFault(row=None, message=f"all values of {self._name} are zero; it was never computed or copied")
            return
        if self._is_level and self._width * self._rows_seen > 1:
            yield StateFault(row=None, message=f"all values of {self._name} have one magnitude; it holds no states")
            return
        yield from self._repeated()
        if self._zero_row is not None and self._name != _EMBEDDINGS:
            row = self._zero_row
            yield StateFault(row=row, message=f"row {row} of {self._name} is all zeros; it was never written")

    def _repeated(self) -> Iterator[StateFault]:
        num_pairs = int(np.count_nonzero(self._ids_T[1:] != self._ids_T[:-1]))
        is_gross = self._num_equal * 2 >= num_pairs and self._num_equal > 0
        if is_gross or (self._num_equal and self._width >= _MIN_WIDTH and self._name != _EMBEDDINGS):
            row = self._equal_rows[0]
            yield StateFault(
                row=row,
                message=f"row {row} of {self._name} repeats row {row - 1} though the token is another "
                f"({self._num_equal:,} of {counted(num_pairs, 'such row does', 'such rows do')})",
            )

    def _look_for_level(self, bits_NH: Bits) -> None:
        if not self._is_level:
            return
        if self._level is None:
            self._level = int(bits_NH[0, 0] & _MAGNITUDE)
        self._is_level = bool(((bits_NH[0] & _MAGNITUDE) == self._level).all()) and bool(
            ((bits_NH & _MAGNITUDE) == self._level).all()
        )

    def _look_for_not_finite(self, bits_NH: Bits) -> None:
        if bits_NH.view(np.int16).max() < _INFINITY and bits_NH.max() < _NEGATIVE_INFINITY:
            return
        magnitudes_NH = bits_NH & _MAGNITUDE
        row = int(np.argmax((magnitudes_NH >= _INFINITY).any(axis=1)))
        what = "NaN" if (magnitudes_NH[row] > _INFINITY).any() else "an infinite value"
        row += self._rows_seen
        self._not_finite = StateFault(row=row, message=f"row {row} of {self._name} holds {what}")

    def _look_at_rows(self, bits_NH: Bits) -> None:
        if self._last_row is not None and self._ids_T[self._rows_seen] != self._ids_T[self._rows_seen - 1]:
            self._compare_rows(bits_NH, self._rows_seen)
        heads_N = _heads(bits_NH)
        ids_N = self._ids_T[self._rows_seen : self._rows_seen + len(bits_NH)]
        for index in np.flatnonzero((heads_N[1:] == heads_N[:-1]) & (ids_N[1:] != ids_N[:-1])):
            self._compare_rows(bits_NH, self._rows_seen + int(index) + 1)
        if self._zero_row is None:
            for index in np.flatnonzero((heads_N & _HEAD_MAGNITUDE) == 0):
                if not (bits_NH[index] & _MAGNITUDE).any():
                    self._zero_row = self._rows_seen + int(index)
                    break

    def _compare_rows(self, bits_NH: Bits, row: int) -> None:
        here = bits_NH[row - self._rows_seen]
        before = self._last_row if row == self._rows_seen else bits_NH[row - self._rows_seen - 1]
        if before is not None and bool((here == before).all()):
            self._num_equal += 1
            self._equal_rows = self._equal_rows or [row]

    def _take_norms(self, bits_NH: Bits) -> None:
        first, last = np.searchsorted(self._norm_rows, (self._rows_seen, self._rows_seen + len(bits_NH)))
        if first < last:
            rows = self._norm_rows[first:last]
            floats_NH = (bits_NH[rows - self._rows_seen].astype(np.uint32) << 16).view(np.float32)
            with np.errstate(invalid="ignore"):  # a NaN is a fault of its own
                squares_NH = np.multiply(floats_NH, floats_NH, dtype=np.float64)
                self._norms += np.sqrt(squares_NH.sum(axis=1)).tolist()


def _heads(bits_NH: Bits) -> npt.NDArray[np.uint64]:
    """Return the first values of each row as one number [N]: one comparison instead of one a value."""
    heads_N4 = np.zeros((len(bits_NH), _HEAD), dtype=np.uint16)
    heads_N4[:, : bits_NH.shape[1]] = bits_NH[:, :_HEAD]
    return heads_N4.view(np.uint64)[:, 0]


def norm_rows(num_tokens: int) -> npt.NDArray[np.int64]:
    """Return up to 64 row numbers, evenly spaced over 0..T-1, ends included."""
    rows = np.linspace(0, num_tokens - 1, min(num_tokens, NUM_NORM_ROWS))
    return np.unique(np.rint(rows).astype(np.int64))
