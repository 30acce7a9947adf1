"""Character spans to token masks, with offsets and without."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from eaglehs.extraction.loss_mask import count_shared_tokens, mask_from_offsets, mask_from_pieces
from hypothesis import given
from hypothesis import strategies as st


def _letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_token_counts_if_it_shares_a_character_with_a_span():
    offsets = [(0, 3), (3, 5), (5, 9), (9, 10)]
    assert mask_from_offsets([(4, 9)], offsets).tolist() == [0, 1, 1, 0]


def test_neighbours_that_only_touch_a_span_do_not_count():
    assert mask_from_offsets([(3, 5)], [(0, 3), (3, 5), (5, 9)]).tolist() == [0, 1, 0]


def test_all_tokens_of_one_character_count_together():
    assert mask_from_offsets([(1, 2)], [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]).tolist() == [0, 1, 1, 1, 0]


def test_a_token_of_no_width_counts_inside_a_span_only():
    assert mask_from_offsets([(2, 6)], [(0, 2), (2, 2), (4, 4), (6, 6)]).tolist() == [0, 0, 1, 0]


def test_no_tokens_give_an_empty_mask_of_bytes():
    mask = mask_from_offsets([(0, 3)], [])
    assert mask.dtype == np.uint8
    assert mask.shape == (0,)


def test_a_token_across_the_start_of_a_span_is_counted_as_shared():
    assert count_shared_tokens([(4, 9)], [(0, 3), (3, 5), (5, 9)]) == 1
    assert count_shared_tokens([(3, 9)], [(0, 3), (3, 5), (5, 9)]) == 0
    assert count_shared_tokens([(3, 9)], []) == 0


def test_without_offsets_the_pieces_between_borders_give_the_mask():
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return _letters(text)

    mask = mask_from_pieces("abcdefg", [(2, 4), (6, 7)], _letters("abcdefg"), encode)
    assert mask is not None
    assert mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert calls == ["ab", "cd", "ef", "g"], "each character is tokenised once more, not once a border"


def test_pieces_that_get_a_token_in_front_fall_back_to_prefixes():
    def encode(text: str) -> list[int]:  # as SentencePiece does it
        return [1, *_letters(text)]

    mask = mask_from_pieces("abcd", [(1, 3)], encode("abcd"), encode)
    assert mask is not None
    assert mask.tolist() == [0, 0, 1, 1, 0]


def test_a_token_across_a_border_without_offsets_gives_no_mask():
    def encode(text: str) -> list[int]:
        return _letters(text.replace("bc", "X"))

    assert mask_from_pieces("abcd", [(2, 4)], encode("abcd"), encode) is None


@given(
    widths=st.lists(st.integers(1, 4), max_size=20), spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)))
)
def test_the_mask_is_what_a_look_at_each_character_says(widths: list[int], spans: list[tuple[int, int]]):
    ends = np.cumsum([0, *widths])
    offsets = [(int(a), int(b)) for a, b in pairwise(ends)]
    ranges = [(start, start + length) for start, length in spans]
    trained = {place for start, end in ranges for place in range(start, end)}
    expected = [int(any(place in trained for place in range(a, b))) for a, b in offsets]
    assert mask_from_offsets(ranges, offsets).tolist() == expected


@pytest.mark.parametrize("spans", [[], [(0, 0)]])
def test_no_span_trains_nothing(spans: list[tuple[int, int]]):
    assert mask_from_offsets(spans, [(0, 2), (2, 4)]).sum() == 0
