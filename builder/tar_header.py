r"""USTAR headers: 512 bytes before each member, fixed but for name and size, so that equal contents are equal files.

Layout (POSIX.1-1988): name 100, mode 8, uid 8, gid 8, size 12, mtime 12, checksum 8, type 1, link name 100, magic
`ustar\0`, version `00`, owner 32, group 32, device numbers 8 + 8, prefix 155, zeros up to 512. Numbers are octal text.
We write mode 0644, owner and group 0 without names, time 0, and never a prefix or an extended header: PAX headers
double small members and some readers fail on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schemas.errors import DataError

BLOCK = 512
RECORD = 10_240
"""A tar file is filled with zeros to a multiple of this, as GNU tar does."""

END_BYTES = 2 * BLOCK
"""Two blocks of zeros end the archive."""

MAX_NAME_BYTES = 100
_MODE, _OWNER, _GROUP = slice(100, 108), slice(108, 116), slice(116, 124)
_SIZE, _TIME, _CHECKSUM = slice(124, 136), slice(136, 148), slice(148, 156)
_TYPE, _MAGIC, _PREFIX = slice(156, 157), slice(257, 265), slice(345, 346)
_DEVICE_MAJOR, _DEVICE_MINOR = slice(329, 337), slice(337, 345)
_SIZE_LIMIT = 8**11
_USTAR = b"ustar" + bytes(1) + b"00"
_PLAIN_FILE = b"0"


class TarHeaderError(DataError):
    """A block that should be a member's header is not a USTAR header of a plain file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TarHeader:
    """What a reader needs of a member's header."""

    name: str
    size: int


def pad_to(size: int, unit: int) -> int:
    """Return `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def file_bytes(members_end: int) -> int:
    """Return the size of the finished tar whose last member's blocks end at `members_end`."""
    return pad_to(members_end + END_BYTES, RECORD)


def tar_header(name: str, size: int) -> bytes:
    """Return the 512 bytes before a member of `size` bytes. `name` is ASCII, at most 100 characters."""
    raw_name = name.encode("ascii")
    assert len(raw_name) <= MAX_NAME_BYTES, name
    assert size < _SIZE_LIMIT, size
    header = bytearray(BLOCK)
    header[: len(raw_name)] = raw_name
    header[_MODE] = _octal_field(0o644, 8)
    header[_OWNER] = header[_GROUP] = _octal_field(0, 8)
    header[_SIZE] = _octal_field(size, 12)
    header[_TIME] = _octal_field(0, 12)
    header[_TYPE] = _PLAIN_FILE
    header[_MAGIC] = _USTAR
    header[_DEVICE_MAJOR] = header[_DEVICE_MINOR] = _octal_field(0, 8)
    header[_CHECKSUM] = _octal_field(_checksum(header), 7) + b" "
    return bytes(header)


def parse_tar_header(block: bytes, *, where: str) -> TarHeader:
    """Read a member's header; `where` names file and offset in errors. Time, owner and mode may be any.

    Raises:
        TarHeaderError: not 512 bytes, not USTAR, a wrong checksum, no plain file, or a name with a prefix.
    """
    if len(block) < BLOCK:
        raise TarHeaderError(f"{where}: {len(block)} of a header's 512 bytes are there", why="The file is cut")
    if block[_MAGIC] != _USTAR:
        raise TarHeaderError(f"{where}: not a USTAR header (magic {block[_MAGIC]!r})")
    if _octal(block[_CHECKSUM], "checksum", where) != _checksum(block):
        raise TarHeaderError(f"{where}: the header's checksum is wrong", why="The file is damaged")
    if block[_TYPE] != _PLAIN_FILE:
        raise TarHeaderError(f"{where}: a member of type {block[_TYPE]!r}; shards hold plain files only")
    if block[_PREFIX] != bytes(1):
        raise TarHeaderError(f"{where}: the member's name has a prefix; shards have flat, short names")
    try:
        name = block[:MAX_NAME_BYTES].rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise TarHeaderError(f"{where}: the member's name {block[:40]!r} is not ASCII") from None
    return TarHeader(name=name, size=_octal(block[_SIZE], "size", where))


def _checksum(header: bytes | bytearray) -> int:
    return sum(header) - sum(header[_CHECKSUM]) + 8 * ord(" ")


def _octal_field(value: int, width: int) -> bytes:
    return b"%0*o" % (width - 1, value) + bytes(1)


def _octal(field: bytes, what: str, where: str) -> int:
    digits = field.strip(b"\0 ")
    if not digits or digits.strip(b"01234567"):
        raise TarHeaderError(f"{where}: the header's {what} {field!r} is not an octal number")
    return int(digits, 8)
