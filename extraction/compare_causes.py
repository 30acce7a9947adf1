"""What a stored state is instead of what it should be, in words: the faults that the field has really made."""

from __future__ import annotations

import re

from ..schemas.states import FINAL

BEFORE_NORM = "the last layer's output, before the last norm"
NORMED_TWICE = "the final state, normed once more"
ROW_AHEAD = "the right state of token t+1 in row t"
ROW_BEHIND = "the right state of token t-1 in row t"
OTHER_SAMPLE = "the rows of sample "

_INDEX = re.compile(r"hidden_states\[(\d+)\]")


def explain(state: str, looks_like: str, *, is_everywhere: bool) -> str:
    """Return what is wrong with `state`, which looks like `looks_like`; "" for nothing that the model computes.

    `is_everywhere`: in all samples that were checked, not in some.
    """
    if not looks_like:
        cause = (
            "made by another model, revision or tokenizer"
            if is_everywhere
            else "the rows of another sample, or of another token list"
        )
        return f"{state} holds nothing that this model computes for these tokens: {cause}"
    return f"{state} holds {looks_like}: {_cause(state, looks_like)}"


def _cause(state: str, looks_like: str) -> str:
    if looks_like.startswith(OTHER_SAMPLE):
        return "samples were swapped"
    if looks_like in (ROW_AHEAD, ROW_BEHIND):
        return "rows are shifted by one"
    return _cause_of_final(looks_like) if state == FINAL else _cause_of_layer(state, looks_like)


def _cause_of_layer(state: str, looks_like: str) -> str:
    layer, index = int(state.removeprefix("layer_")), _INDEX.fullmatch(looks_like)
    if index is None:
        return "captured past the last layer, not as the input of a layer"
    if int(index[1]) == layer + 1:
        return f"captured as output of layer {layer}, not as its input"
    if int(index[1]) == layer - 1:
        return f"captured one layer too early, as input of layer {layer - 1}"
    return f"captured at layer {index[1]}"


def _cause_of_final(looks_like: str) -> str:
    if looks_like == BEFORE_NORM:
        return "the last norm is missing, so it is not the LM head's input"
    if looks_like == NORMED_TWICE:
        return "the last norm was applied twice"
    return "captured at another layer, not at the LM head's input"
