"""USTAR headers: the same bytes for the same member, read by Python's tarfile, strict on the way back."""

import tarfile

import pytest
from eaglehs.builder.tar_header import TarHeaderError, file_bytes, parse_tar_header, tar_header
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}\.(meta\.json|layer_61\.bf16\.npy)", fullmatch=True)


@given(NAMES, st.integers(0, 8**11 - 1))
def test_tarfile_and_our_reader_read_what_is_written(name, size):
    block = tar_header(name, size)
    info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    assert (info.name, info.size, info.mtime, info.mode, info.uid, info.gid) == (name, size, 0, 0o644, 0, 0)
    assert (info.uname, info.gname, info.type) == ("", "", tarfile.REGTYPE)
    found = parse_tar_header(block, where="x")
    assert (found.name, found.size) == (name, size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:100], "100 of a header's 512 bytes"),
        (lambda b: b[:257] + b"ustar  \0" + b[265:], "not a USTAR header"),
        (lambda b: b"q" + b[1:], "checksum is wrong"),
        (lambda b: b[:148] + b"zzzzzz\0 " + b[156:], "not an octal number"),
    ],
)
def test_a_damaged_header_is_refused_with_its_place(change, message):
    with pytest.raises(TarHeaderError, match=message) as caught:
        parse_tar_header(change(tar_header("p0.meta.json", 512)), where="x.tar at byte 0")
    assert str(caught.value).startswith("x.tar at byte 0")


def test_headers_of_other_kinds_are_refused():
    link = tarfile.TarInfo("p0.meta.json")
    link.type = tarfile.SYMTYPE
    with pytest.raises(TarHeaderError, match="plain files only"):
        parse_tar_header(link.tobuf(tarfile.USTAR_FORMAT), where="x")
    deep = tarfile.TarInfo("folder/" * 20 + "p0.meta.json")
    with pytest.raises(TarHeaderError, match="prefix"):
        parse_tar_header(deep.tobuf(tarfile.USTAR_FORMAT), where="x")


def test_a_file_is_filled_to_whole_records():
    assert [file_bytes(end) for end in (0, 512, 9216, 9217)] == [10_240, 10_240, 10_240, 20_480]
