"""The table of SGLang releases, and that PATCHES.md says the same."""

import re
from pathlib import Path

import pytest
from eaglehs.extraction import sglang_versions
from eaglehs.extraction.sglang_versions import RELEASES, is_supported, parse_version, supported_range


@pytest.mark.parametrize(
    ("text", "version", "supported"),
    [
        ("0.5.11", (0, 5, 11), True),
        ("0.5.16.dev3+g12ab", (0, 5, 16), True),
        ("v0.5.23.post1", (0, 5, 23), True),
        ("0.5.10", (0, 5, 10), False),
        ("0.5.24", (0, 5, 24), False),
        ("0.6.0rc1", (0, 6, 0), False),
        ("unknown", (), False),
    ],
)
def test_versions_are_compared_by_their_numbers(text: str, version: tuple[int, ...], supported: bool):
    assert parse_version(text) == version
    assert is_supported(version) == supported


def test_the_range_in_words_is_the_tables():
    assert supported_range() == "0.5.11 to 0.5.23"


def test_patches_says_of_each_release_how_it_is_known():
    text = (Path(sglang_versions.__file__).parent / "PATCHES.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| (run|read) \|", text, re.MULTILINE)
    assert {parse_version(version): word for version, word in rows} == RELEASES
