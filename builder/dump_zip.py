"""Where the records of a `.pt` file lie: a `torch.save` file is a zip of stored, aligned records.

    <archive>/data.pkl     the pickled dict
    <archive>/data/<n>     the bytes of storage n
    <archive>/...          byteorder, version and the like

Read with care: sizes and offsets come from a file that anyone may have made.
"""

from __future__ import annotations

import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from ..schemas.counts import counted
from ..schemas.errors import DataError

_RECORD = re.compile(
    r"[^/]+/(?:data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/\w+|(data/\d+))"
)
_LOCAL_HEADER_BYTES = 30
_MAX_PICKLE_BYTES = 1024 * 1024
"""A dump's pickle is about 1 kB; a huge one is no dump's and would be slow to read."""

_KNOWN_GLOBALS = re.compile(r"torch\._utils _rebuild_tensor_v2|torch \w+Storage|collections OrderedDict")
_TEXT_OPCODES = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINUNICODE8"})


class DumpError(DataError):
    """A dump can't be read as what it should be; `path` is the file."""

    def __init__(self, path: Path, what: str, *, why: str = "", mend: str = "") -> None:
        """The message begins with the file."""
        self.path = path
        super().__init__(f"{path}: {what}", why=why, mend=mend)


class DumpUnreadableError(DumpError):
    """The file is missing, cut, damaged, or no `torch.save` file of the plain kind."""


class DumpTypeError(DumpError):
    """The file holds something else than tensors and plain types; it is never unpickled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipRecord:
    """The bytes of one storage in the file."""

    offset: int
    length: int


def storage_records(path: Path, file: BinaryIO) -> tuple[ZipRecord, ...]:
    """Return where the storages lie, in file order, after checking the whole zip and its pickle.

    Raises:
        DumpUnreadableError: cut, compressed, encrypted, overlapping or foreign records, or big-endian numbers.
        DumpTypeError: the pickle names a class that a dump never holds.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            places = [(_place(path, file, info), info) for info in archive.infolist()]
            _check_no_overlap(path, [place for place, _ in places], archive.start_dir)
            _check_contents(path, archive)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError) as fault:
        raise cut_error(path, str(fault)) from None
    return tuple(sorted((p for p, info in places if "/data/" in info.filename and p.length), key=lambda p: p.offset))


def cut_error(path: Path, reason: str) -> DumpUnreadableError:
    """Return the error of a file that is no whole `torch.save` file."""
    size_bytes = path.stat().st_size if path.exists() else 0
    return DumpUnreadableError(
        path,
        f"not a whole dump ({counted(size_bytes, 'byte')}: {reason[:200]})",
        why="It was cut or damaged after it was written, or another program wrote it",
        mend="Remove it and run `eaglehs extract` again: the sample is computed anew",
    )


def _place(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> ZipRecord:
    if _RECORD.fullmatch(info.filename) is None:
        raise DumpUnreadableError(path, f"holds a record {info.filename[:80]!r} that no dump has")
    if info.flag_bits & 1:
        raise DumpUnreadableError(path, f"record {info.filename} is encrypted")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise DumpUnreadableError(path, f"record {info.filename} is compressed", why="torch.save never compresses")
    header = os.pread(file.fileno(), _LOCAL_HEADER_BYTES, info.header_offset)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise cut_error(path, f"record {info.filename} has no header at {info.header_offset}")
    name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    offset = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    return ZipRecord(offset=offset, length=info.file_size)


def _check_no_overlap(path: Path, places: list[ZipRecord], directory: int) -> None:
    ordered = sorted(places, key=lambda place: (place.offset, place.length))
    for one, other in pairwise([*ordered, ZipRecord(offset=directory, length=0)]):
        if one.offset + one.length > other.offset:
            raise DumpUnreadableError(path, f"records overlap at offset {other.offset}", why="The file is damaged")


def _check_contents(path: Path, archive: zipfile.ZipFile) -> None:
    by_end = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if len(by_end) < len(archive.infolist()):
        raise DumpUnreadableError(path, "two records have one name", why="The file is damaged")
    if "data.pkl" not in by_end:
        raise DumpUnreadableError(path, "no data.pkl inside", why="It is a zip file, but not one of torch.save")
    if "byteorder" in by_end and archive.read(by_end["byteorder"]) != b"little":
        raise DumpUnreadableError(path, "its numbers are big-endian", mend="Make the dumps on a little-endian machine")
    if by_end["data.pkl"].file_size > _MAX_PICKLE_BYTES:
        raise DumpTypeError(
            path, f"its pickle has {counted(by_end['data.pkl'].file_size, 'byte')}; a dump's has about 1,000"
        )
    for key, name in _globals(archive.read(by_end["data.pkl"])):
        if _KNOWN_GLOBALS.fullmatch(name) is None:
            raise DumpTypeError(
                path,
                f"key {key!r} holds a {name.replace(' ', '.')}",
                why="Dumps hold tensors and plain Python types only; other pickles can run code and are never loaded",
                mend="Write it as a tensor, int, str or list",
            )


def _globals(pickled: bytes) -> Iterator[tuple[str, str]]:
    """Yield (last text before it, `module name`) of each class that a pickle would look up."""
    texts = ["?", "?", "?"]
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _TEXT_OPCODES:
            texts = [*texts[1:], str(argument)]
        elif opcode.name in {"GLOBAL", "INST"}:
            yield texts[-1], str(argument)
        elif opcode.name == "STACK_GLOBAL":
            yield texts[-3], f"{texts[-2]} {texts[-1]}"
