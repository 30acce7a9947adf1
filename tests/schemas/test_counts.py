"""A count and what it counts: one of a thing is no plural."""

import pytest
from eaglehs.schemas.counts import counted


@pytest.mark.parametrize(
    ("num", "nouns", "text"),
    [
        (0, ("shard",), "0 shards"),
        (1, ("shard",), "1 shard"),
        (2, ("shard",), "2 shards"),
        (12_345, ("token id",), "12,345 token ids"),
        (1, ("try", "tries"), "1 try"),
        (3, ("try", "tries"), "3 tries"),
        (1, ("file is", "files are"), "1 file is"),
        (0, ("file is", "files are"), "0 files are"),
    ],
)
def test_one_is_told_apart_from_many(num: int, nouns: tuple[str, ...], text: str):
    assert counted(num, *nouns) == text
