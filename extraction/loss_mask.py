"""Character spans to loss masks, token by token. `T` = tokens.

A span is what an assistant wrote, in characters of the rendered conversation. With a tokenizer that gives offsets a
token is trained if it shares a character with a span. Without offsets (Kimi's own tokenizer class is written in
Python) the text is tokenised once more in pieces that end at the borders of spans; if the pieces' ids are the ids of
the whole, the pieces' lengths are the borders. In both cases the ids are those of the whole text, made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""Start and end (exclusive) in characters."""

Mask = NDArray[np.uint8]


class LossMaskMode(StrEnum):
    """Which tokens the drafter is trained on."""

    ASSISTANT = "assistant"
    """All that the assistant wrote, the ends of its turns included."""

    LAST = "last"
    """The assistant's last turn."""

    ALL = "all"
    """Every token."""


def mask_from_offsets(spans: Sequence[Span], offsets: Sequence[Span]) -> Mask:
    """Return uint8 [T]: 1 for each token that shares a character with a span.

    `offsets` are the tokens' own spans. Several tokens of one character all have that character's span. A token of
    no width (blanks that a tokenizer trims off) counts if it lies inside a span.
    """
    mask_T = np.zeros(len(offsets), np.uint8)
    if not len(offsets):
        return mask_T
    starts_T, ends_T = np.asarray(offsets, np.int64).T
    for start, end in spans:
        if start < end:  # an empty span inside a token shares nothing with it
            mask_T[(ends_T > start) & (starts_T < end)] = 1
    return mask_T


def count_shared_tokens(spans: Sequence[Span], offsets: Sequence[Span]) -> int:
    """Return how many tokens hold both the last characters before a span and its first ones.

    A server never has such a token at that place: it tokenises the prompt alone and then writes whole tokens.
    """
    if not len(offsets):
        return 0
    starts_T, ends_T = np.asarray(offsets, np.int64).T
    return sum(int(((starts_T < start) & (ends_T > start)).sum()) for start, end in spans if start < end)


def mask_from_pieces(
    text: str, spans: Sequence[Span], ids: Sequence[int], encode: Callable[[str], list[int]]
) -> Mask | None:
    """Return the mask of `ids`, the tokens of `text`, by tokenising the text between borders; None if they don't meet.

    Two ways, the cheap one first: the pieces one by one, or each text from the start up to a border. Either counts
    only if its ids are exactly those at the same place of `ids`.
    """
    cuts = sorted({0, len(text), *(border for span in spans for border in span)})
    borders = _borders_of_pieces(text, cuts, ids, encode)
    if borders is None:
        borders = _borders_of_prefixes(text, cuts, ids, encode)
    if borders is None:
        return None
    mask_T = np.zeros(len(ids), np.uint8)
    for start, end in spans:
        mask_T[borders[start] : borders[end]] = 1
    return mask_T


def _borders_of_pieces(
    text: str, cuts: list[int], ids: Sequence[int], encode: Callable[[str], list[int]]
) -> dict[int, int] | None:
    borders, joined = {0: 0}, list[int]()
    for start, end in pairwise(cuts):
        joined += encode(text[start:end])
        borders[end] = len(joined)
    return borders if joined == list(ids) else None


def _borders_of_prefixes(
    text: str, cuts: list[int], ids: Sequence[int], encode: Callable[[str], list[int]]
) -> dict[int, int] | None:
    whole, borders = list(ids), {0: 0, len(text): len(ids)}
    for cut in cuts[1:-1]:
        prefix = encode(text[:cut])
        if whole[: len(prefix)] != prefix:
            return None
        borders[cut] = len(prefix)
    return borders
