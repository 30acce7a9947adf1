"""One block of a coded state: rows of bfloat16 to byte planes under zstd and back, bit for bit (schemas/planes.py).

Shape legend: N rows of the block, H hidden width.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ..schemas.counts import counted
from ..schemas.errors import DataError

BLOCK_BYTES = 2 * 1024 * 1024
"""Bytes of rows that become a block: its planes, its frame and its rows fit a core's cache together. Measured on
near-Gaussian states: 1, 2 and 4 MiB make them 1.467 to 1.468 times smaller, half a MiB 1.459."""

LEVEL = 1
"""zstd's. Measured with its own matching: 3 and 9 are slower and pack byte planes worse, below 1 hardly at all."""

_MATCHING = {"min_match": 7, "hash_log": 6}
"""How zstd looks for repetitions: hardly. The bytes of a plane are alike, not repeated, and what it finds at level 1 is
chance that costs more than it saves. Measured on near-Gaussian states, GB a CPU second: 1.446 times smaller, written at
0.41 and read at 0.87, without these; 1.467, 1.04 and 1.79 with them."""

Rows = npt.NDArray[np.uint16]

_own = threading.local()
"""zstd's contexts and the planes' memory are one thread's each: making them anew costs more than using them."""


class CodedBlockError(DataError):
    """A block of a coded state is cut or damaged."""


def encode_rows(rows_NH: Rows) -> bytes | memoryview:
    """Return the bytes of a block: a frame, or the rows themselves where that is not shorter.

    Equal rows give equal bytes with the same zstd.
    """
    values = rows_NH.reshape(-1)
    planes = _planes(values.nbytes).reshape(2, -1)
    np.right_shift(values, 8, out=planes[0], casting="unsafe")
    np.bitwise_and(values, 0xFF, out=planes[1], casting="unsafe")
    frame: bytes = _context("compressor", _compressor).compress(planes.data)
    return frame if len(frame) < values.nbytes else np.ascontiguousarray(rows_NH).data.cast("B")


def block_checksum(content: bytes | memoryview) -> int:
    """Return what the head's table says of a block of these bytes."""
    return xxhash.xxh3_64_intdigest(content) & 0xFFFFFFFF


def decode_rows(content: bytes | memoryview, checksum: int, out_NH: Rows, *, where: str) -> None:
    """Write the rows of a block to `out_NH`, a C-contiguous array of its shape.

    Raises:
        CodedBlockError: the bytes are not those that were written; `where` names file, sample, array and block.
    """
    found = block_checksum(content)
    if found != checksum:
        raise CodedBlockError(
            f"{where}: its bytes have the checksum {found:08x}, the head says {checksum:08x}",
            why="The shard was damaged on its way here",
            mend="Copy the shard again; `eaglehs verify` names all that is wrong with it",
        )
    values = out_NH.reshape(-1)
    if len(content) == values.nbytes:
        values[:] = np.frombuffer(content, dtype="<u2")
        return
    planes = _unpacked(content, values.nbytes, where).reshape(2, -1)
    values[:] = planes[0]
    np.left_shift(values, 8, out=values)
    np.bitwise_or(values, planes[1], out=values)


def _unpacked(frame: bytes | memoryview, size: int, where: str) -> npt.NDArray[np.uint8]:
    """Return the content of a frame in this thread's own memory, which the next call uses again."""
    try:
        said = zstandard.frame_content_size(frame)
        if said != size:
            raise CodedBlockError(f"{where}: its frame is of {counted(said, 'byte')}, its rows have {size:,}")
        planes = _planes(size)
        context = _context("decompressor", zstandard.ZstdDecompressor)
        with context.stream_reader(frame) as reader:
            count = 0
            while count < size and (step := reader.readinto(planes[count:].data)):
                count += step
    except zstandard.ZstdError as fault:
        raise CodedBlockError(f"{where}: zstd can't read it ({fault})") from None
    if count < size:
        raise CodedBlockError(f"{where}: its frame ends after {count:,} of {counted(size, 'byte')}")
    return planes


def _compressor() -> zstandard.ZstdCompressor:
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, **_MATCHING)
    return zstandard.ZstdCompressor(compression_params=parameters)


def _planes(size: int) -> npt.NDArray[np.uint8]:
    memory: npt.NDArray[np.uint8] | None = getattr(_own, "planes", None)
    if memory is None or len(memory) < size:
        memory = _own.planes = np.empty(size, dtype=np.uint8)
    return memory[:size]


def _context(name: str, make: Any) -> Any:
    found = getattr(_own, name, None)
    if found is None:
        found = make()
        setattr(_own, name, found)
    return found
