"""GB is decimal, GiB is binary, and what is neither is refused."""

import pytest
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.sizes import format_size, parse_size
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("2GB", 2_000_000_000),
        ("2GiB", 2_147_483_648),
        ("2g", 2_000_000_000),
        ("1.5GB", 1_500_000_000),
        ("2 GB", 2_000_000_000),
        ("100 kB", 100_000),
        ("64KiB", 65_536),
        ("1TB", 10**12),
        ("512", 512),
        (" 7b ", 7),
    ],
)
def test_sizes_mean_what_their_unit_says(text: str, size_bytes: int):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["0", "-1", "2XB", "", "GB", "two", "1e9", "0.1", "1,5GB", "2GB2"])
def test_what_is_no_size_is_refused_with_the_text(text: str):
    with pytest.raises(UsageError, match="2GB"):
        parse_size(text)


@given(st.integers(1, 10**15))
def test_a_plain_number_is_bytes(size_bytes: int):
    assert parse_size(str(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (57_344, "57.3 kB"), (992_000_000_000, "992 GB"), (999_999, "1 MB")],
)
def test_sizes_are_shown_as_the_hub_counts(size_bytes: int, text: str):
    assert format_size(size_bytes) == text
