"""Counts as people read them: `1 shard`, `2 shards`, `1,000 tokens`."""

from __future__ import annotations


def counted(num: int, one: str, many: str = "") -> str:
    """Return `num` and its noun, with commas between thousands.

    `many` is what more than one are called, where that is more than an s at the end: "reply", "replies", or with the
    verb that goes along, "file is", "files are".
    """
    return f"{num:,} {one if num == 1 else many or f'{one}s'}"
