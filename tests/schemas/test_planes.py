"""The head of a coded state against bytes that were written by hand from the format text."""

import struct

import pytest
from eaglehs.schemas.planes import (
    FIXED,
    PlanesHead,
    PlanesHeadError,
    head_bytes,
    read_head,
    size_of_head,
    write_head,
)
from hypothesis import given
from hypothesis import strategies as st

# 5 rows of width 3 in blocks of 2 rows: 12, 12 and 6 bytes of bfloat16.
BY_HAND = (
    b"EHPLANES"
    + bytes([1, 0, 0, 0])  # version
    + bytes([3, 0, 0, 0])  # H
    + bytes([5, 0, 0, 0, 0, 0, 0, 0])  # T
    + bytes([2, 0, 0, 0])  # R
    + bytes([3, 0, 0, 0])  # B
    + bytes([12, 0, 0, 0, 1, 0, 0, 0xFF])
    + bytes([7, 0, 0, 0, 2, 0, 0, 0])
    + bytes([6, 0, 0, 0, 3, 0, 0, 0])
)
HEAD = PlanesHead(num_rows=5, width=3, block_rows=2, blocks=((12, 0xFF000001), (7, 2), (6, 3)))


def test_the_head_is_that_of_the_format_text():
    assert write_head(HEAD) == BY_HAND
    assert read_head(BY_HAND, where="x") == HEAD
    assert size_of_head(BY_HAND[:32], where="x") == len(BY_HAND) == HEAD.head_bytes == head_bytes(3)
    assert HEAD.member_bytes == 56 + 12 + 7 + 6


@pytest.mark.parametrize(
    ("start", "end", "numbers"),
    [(0, None, [0, 1, 2]), (0, 1, [0]), (0, 2, [0]), (0, 3, [0, 1]), (2, 4, [1]), (3, 5, [1, 2]), (4, 99, [2])],
)
def test_only_the_blocks_that_hold_wanted_rows_are_named(start, end, numbers):
    blocks = list(HEAD.placed(start, end))
    assert [block.number for block in blocks] == numbers
    for block in blocks:
        assert (block.offset, block.length) == [(56, 12), (68, 7), (75, 6)][block.number]
        assert (block.start, block.end) == [(0, 2), (2, 4), (4, 5)][block.number]


@given(
    num_rows=st.integers(1, 1000),
    width=st.integers(1, 300),
    block_rows=st.integers(1, 1200),
    checksum=st.integers(0, 2**32 - 1),
)
def test_any_head_comes_back_from_its_bytes(num_rows, width, block_rows, checksum):
    count = -(-num_rows // block_rows)
    head = PlanesHead(num_rows=num_rows, width=width, block_rows=block_rows, blocks=((1, checksum),) * count)
    content = write_head(head)
    assert read_head(content + b"the blocks", where="x") == head
    assert sum(block.end - block.start for block in head.placed()) == num_rows


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda head: head[:20], "no coded state"),
        (lambda head: b"\x93NUMPY" + head[6:], "no coded state, but b'\\x93NUMPYES'"),
        (lambda head: head[:-1], "55 bytes of a head of 56"),
        (lambda head: changed(head, 8, 2), "version 2; this eaglehs reads version 1"),
        (lambda head: changed(head, 12, 0), "5 rows of width 0"),
        (lambda head: changed(head, 16, 0), "0 rows of width 3"),
        (lambda head: changed(head, 16, 9), "9 rows of width 3 in 3 blocks of 2"),
        (lambda head: changed(head, 20, 1), "rows of width 3 in 3 blocks"),
        (lambda head: changed(head, 24, 0), "blocks of 0"),
        (lambda head: changed(head, 28, 2), "in 2 blocks of 2"),
        (lambda head: changed(head, 32, 13), "block 0 of 12 bytes has 13"),
        (lambda head: changed(head, 48, 0), "block 2 of 6 bytes has 0"),
    ],
)
def test_a_damaged_head_is_refused_with_what_it_says(damage, message: str):
    with pytest.raises(PlanesHeadError) as caught:
        read_head(damage(BY_HAND), where="train.tar: final of sample p0")
    assert message in str(caught.value)
    assert str(caught.value).startswith("train.tar: final of sample p0: ")


def changed(head: bytes, place: int, value: int) -> bytes:
    return head[:place] + struct.pack("<I", value) + head[place + 4 :]


def test_no_head_claims_more_than_a_member_may_hold():
    """A number in a damaged head must not become an allocation."""
    huge = FIXED.pack(b"EHPLANES", 1, 2**32 - 1, 2**63, 2**32 - 1, 2**32 - 1)
    with pytest.raises(PlanesHeadError, match="its head says 9,223,372,036,854,775,808 rows"):
        size_of_head(huge, where="x")
