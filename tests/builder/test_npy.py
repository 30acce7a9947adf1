"""`.npy` headers: accepted by numpy, of the length that was asked for, placed where stock readers are fastest."""

import io

import numpy as np
import pytest
from eaglehs.builder.npy import NpyHeaderError, npy_header, padded_header_bytes, parse_npy_header
from hypothesis import given
from hypothesis import strategies as st

SHAPES = st.tuples(st.integers(0, 10**9), st.integers(1, 100_000))


@given(SHAPES, st.sampled_from(["<u2", "<i4", "|u1"]), st.integers(2, 156))
def test_numpy_reads_a_header_of_any_length_that_is_a_multiple_of_64(shape, dtype, blocks):
    header = npy_header(dtype, shape, 64 * blocks)
    assert len(header) == 64 * blocks
    found = io.BytesIO(header)
    assert np.lib.format.read_magic(found) == (1, 0)
    found_shape, is_fortran, found_dtype = np.lib.format.read_array_header_1_0(found)
    assert (found_shape, is_fortran, found_dtype, found.tell()) == (shape, False, np.dtype(dtype), len(header))
    parsed = parse_npy_header(header + b"array", where="x")
    assert (parsed.dtype, parsed.shape, parsed.header_bytes) == (dtype, shape, len(header))


def test_a_plain_header_is_what_numpy_writes():
    array = np.zeros((3, 7168), "<u2")
    written = io.BytesIO()
    np.lib.format.write_array(written, array, version=(1, 0))
    assert written.getvalue()[:128] == npy_header("<u2", (3, 7168), 128)


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_a_padded_array_starts_aligned_and_ends_with_a_block_of_a_tar_stream(block, rows):
    header_offset, nbytes = 512 * block, rows * 64
    length = padded_header_bytes(header_offset, nbytes)
    assert 128 <= length <= 10_000
    assert (header_offset + length) % 64 == 0
    if length != 128:
        assert (header_offset + length + nbytes - 512) % 10_240 == 0


def test_padding_is_possible_at_nearly_all_places():
    plain = [padded_header_bytes(512 * block, 64 * 1121) for block in range(1, 20 * 20)].count(128)
    assert plain / 399 < 0.06


def test_an_array_whose_size_is_no_multiple_of_64_keeps_the_plain_header():
    assert padded_header_bytes(1024, 1_000_001) == 128
    assert padded_header_bytes(1024, 1_000_002) == 128


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x93NUMPY\x02\x00" + bytes(120),
        npy_header("<u2", (3, 4), 128)[:100],
        npy_header("<u2", (3, 4), 128).replace(b"'<u2'", b"'<f2'"),
        npy_header("<u2", (3, 4), 128).replace(b"False", b"True "),
        npy_header("<u2", (3, 4), 128).replace(b"(3, 4)", b"(12, )"),
        npy_header("<u2", (3, 4), 128).replace(b"(3, 4)", b"(3, 0)"),
    ],
)
def test_a_foreign_header_is_refused_by_name(header):
    with pytest.raises(NpyHeaderError, match=r"x\.tar: p0\.final"):
        parse_npy_header(header, where="x.tar: p0.final.bf16.npy")
