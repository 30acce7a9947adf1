"""The last ledger line of each key, in memory for as long as a run lasts, at less than half of the records' own bytes.

A record of a finished sample takes some 900 bytes as objects, most of it hash, dump names and norms, which are asked
for once, when its shard is sealed. Here they are packed into bytes and become a record again when one is asked for, in
some microseconds.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, NamedTuple

from .sample import DumpRef

if TYPE_CHECKING:
    from .ledger import LedgerEntry, SampleStatus

_NUMBERS = struct.Struct("<qqqd")
_DUMP = struct.Struct("<q16sH")


class _Packed(NamedTuple):
    id: str
    status: SampleStatus
    reason: str
    shard: str
    states: tuple[str, ...]
    """The same object for all samples of a run."""

    numbers: bytes
    """num_tokens, attempt, next_token, finished_at; then a float64 a state."""

    dumps: bytes
    """Size, hash and length of the name of each, then the name."""


class LedgerEntries(MutableMapping[str, "LedgerEntry"]):
    """Key -> entry, in the order of first lines; written by one thread at a time, read by any."""

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._rows: dict[str, _Packed | LedgerEntry] = {}
        self._states: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __getitem__(self, key: str) -> LedgerEntry:
        """Return the entry; equal to the one that was put in, not the same object."""
        row = self._rows[key]
        return _unpacked(key, row) if isinstance(row, _Packed) else row

    def __setitem__(self, key: str, entry: LedgerEntry) -> None:
        names = tuple(entry.state_norms)
        packed = _packed(key, entry, self._states.setdefault(names, names))
        self._rows[key] = entry if packed is None else packed

    def __delitem__(self, key: str) -> None:
        del self._rows[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows


def _packed(key: str, entry: LedgerEntry, states: tuple[str, ...]) -> _Packed | None:
    """Return the entry in bytes; None for one that has something that they can't hold."""
    norms = struct.pack(f"<{len(states)}d", *entry.state_norms.values())
    try:
        numbers = _NUMBERS.pack(entry.num_tokens, entry.attempt, entry.next_token, entry.finished_at)
        dumps = b"".join(_packed_dump(dump) for dump in entry.dumps)
    except (struct.error, ValueError):
        return None
    return _Packed(
        id=key if entry.id == key else entry.id,
        status=entry.status,
        reason=entry.reason,
        shard=sys.intern(entry.shard),
        states=states,
        numbers=numbers + norms,
        dumps=dumps,
    )


def _packed_dump(dump: DumpRef) -> bytes:
    name, digest = dump.name.encode("utf-8", "surrogatepass"), bytes.fromhex(dump.xxh3_128)
    if digest.hex() != dump.xxh3_128 or len(digest) != 16:
        raise ValueError(dump.xxh3_128)  # caught above: not a hash as we write it
    return _DUMP.pack(dump.size_bytes, digest, len(name)) + name


def _unpacked(key: str, row: _Packed) -> LedgerEntry:
    from .ledger import LedgerEntry

    num_tokens, attempt, next_token, finished_at = _NUMBERS.unpack_from(row.numbers)
    norms = struct.unpack_from(f"<{len(row.states)}d", row.numbers, _NUMBERS.size)
    return LedgerEntry(
        key=key,
        id=row.id,
        num_tokens=num_tokens,
        status=row.status,
        attempt=attempt,
        reason=row.reason,
        next_token=next_token,
        dumps=tuple(_unpacked_dumps(row.dumps)),
        state_norms=dict(zip(row.states, norms, strict=True)),
        shard=row.shard,
        finished_at=finished_at,
    )


def _unpacked_dumps(content: bytes) -> Iterator[DumpRef]:
    offset = 0
    while offset < len(content):
        size_bytes, digest, length = _DUMP.unpack_from(content, offset)
        start = offset + _DUMP.size
        offset = start + length
        yield DumpRef(
            name=content[start:offset].decode("utf-8", "surrogatepass"), size_bytes=size_bytes, xxh3_128=digest.hex()
        )
