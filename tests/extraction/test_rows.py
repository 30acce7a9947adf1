"""Rows of a request, told by the names of its dumps."""

from itertools import pairwise
from pathlib import Path

import pytest
from eaglehs.extraction.rows import RowsOf, dumps_in
from eaglehs.schemas.dump import DumpName
from hypothesis import given
from hypothesis import strategies as st

RID = "eh-run1-a-0"


def make_rows(num_tokens: int, *ranges: tuple[int, int]) -> RowsOf:
    rows = RowsOf(rid=RID, num_tokens=num_tokens)
    for start, end in ranges:
        rows.add(DumpName(rid=RID, start=start, end=end))
    return rows


@given(st.sets(st.integers(1, 199), max_size=10), st.randoms(use_true_random=False))
def test_any_chunks_in_any_order_are_whole_and_without_one_of_them_its_rows_are_missing(cuts: set[int], random):
    chunks = list(pairwise([0, *sorted(cuts), 200]))
    random.shuffle(chunks)
    rows = make_rows(200, *chunks)
    assert rows.is_whole
    assert not rows.fault
    assert not rows.missing
    assert [name.start for name in rows.names] == sorted(start for start, _ in chunks)
    less = make_rows(200, *chunks[1:])
    assert not less.is_whole
    assert less.missing == [chunks[0]]


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        ([(0, 6), (0, 10)], "rows 0..5 came twice"),
        ([(0, 6), (4, 10)], "rows 4..5 came twice"),
        ([(0, 10), (2, 4)], "rows 2..3 came twice"),
        ([(0, 12)], "rows up to 11 came for 10 tokens"),
        ([(0, 4)], ""),
    ],
)
def test_what_waiting_can_not_mend_is_named(ranges: list[tuple[int, int]], fault: str):
    rows = make_rows(10, *ranges)
    assert rows.fault == fault
    assert not rows.is_whole


def test_rows_past_the_prompt_are_not_taken():
    rows = make_rows(4, (0, 4))
    assert not rows.add(DumpName(rid=RID, start=4, end=5))
    assert rows.is_whole


def test_other_files_are_passed_over(tmp_path: Path):
    for name in (f"{RID}.000000-000006.pt", f".{RID}.000006-000007.pt.1.part", "eh-run1-a-01.000000-000006.pt", "x.pt"):
        (tmp_path / name).touch()
    assert list(dumps_in(tmp_path, f"{RID}.")) == [DumpName(rid=RID, start=0, end=6)]
