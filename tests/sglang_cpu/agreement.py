"""The one question: are these rows what transformers computes for these tokens at these layers?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .dumps import Captured
from .reference import Reference

WORSE_THAN_ROUNDING = 1.5
"""Captured states may be so many times as far from float32 as transformers' own bfloat16 states are."""


def assert_right_rows(captured: Captured, reference: Reference, prompt: Sequence[int], answer: dict[str, Any]) -> None:
    """Hold one request's rows against transformers: by ids, by the nearest state, by the server's own next token."""
    assert captured.input_ids == list(prompt)
    assert captured.prompt_tokens == {len(prompt)}
    assert answer["meta_info"]["cached_tokens"] == 0
    for name, state_TH in captured.states.items():
        index = reference.index_of(name)
        assert state_TH.shape == reference.exact[index].shape
        assert reference.nearest_index(state_TH) == index, f"{name} is nearer to another state of transformers"
    assert reference.is_next_token(answer["output_ids"][0], captured.states["final"])


def assert_as_exact(pairs: Sequence[tuple[Captured, Reference]], *, yardsticks: Sequence[Reference]) -> None:
    """Hold the error of all rows together against the larger of transformers' own, on these and on the yardsticks.

    The median over tokens, because single tokens whose experts flip dominate a sum. Over several prompts or with a
    yardstick, because one flip early in a prompt moves all its later rows: transformers' own error differs eightfold
    between prompts of 30 tokens of the tiny mixture of experts.
    """
    for name in pairs[0][0].states:
        index = pairs[0][1].index_of(name)
        found = float(torch.cat([reference.errors_of(rows.states[name], index) for rows, reference in pairs]).median())
        own = [torch.cat([reference.own_errors(index) for _, reference in pairs])]
        own += [yardstick.own_errors(index) for yardstick in yardsticks]
        allowed = WORSE_THAN_ROUNDING * max(float(errors.median()) for errors in own)
        assert found <= allowed, f"{name}: {found:.4f} from float32, transformers in bfloat16 {allowed:.4f} at most"
