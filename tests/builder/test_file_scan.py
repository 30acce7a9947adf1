"""One pass over a file: every byte is heard once, each listener hears its own in whole rows."""

import os
from pathlib import Path

import pytest
from eaglehs.builder import file_scan
from eaglehs.builder.file_scan import FileCutError, Region, scan_file
from hypothesis import given, settings
from hypothesis import strategies as st


def scanned(path: Path, places: list[tuple[int, int, int]], size_bytes: int | None = None):
    whole, parts = bytearray(), [[] for _ in places]
    regions = [
        Region(offset=o, length=n, row_bytes=r, take=lambda block, part=part: part.append(bytes(block)))
        for (o, n, r), part in zip(places, parts, strict=True)
    ]
    with path.open("rb") as file:
        scan_file(path, file.fileno(), size_bytes or path.stat().st_size, regions, whole.extend)
    return bytes(whole), parts


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(1, 9)), max_size=6), st.integers(0, 40))
@settings(max_examples=60)
def test_all_bytes_are_heard_in_order_and_regions_in_whole_rows(tmp_path_factory, gaps, rest):
    places, offset = [], 0
    for gap, rows, row_bytes in gaps:
        places.append((offset + gap, rows * row_bytes, row_bytes))
        offset += gap + rows * row_bytes
    path = tmp_path_factory.mktemp("scan") / "f"
    content = os.urandom(offset + rest)
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_scan, "BLOCK_BYTES", 7)
        whole, parts = scanned(path, places)
    assert whole == content
    for (start, length, row_bytes), blocks in zip(places, parts, strict=True):
        assert b"".join(blocks) == content[start : start + length]
        assert all(len(block) % row_bytes == 0 for block in blocks)


def test_a_file_that_ends_early_is_an_error_with_the_place(tmp_path: Path):
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    with pytest.raises(FileCutError, match="ends at 100"):
        scanned(path, [(10, 150, 1)], size_bytes=200)
