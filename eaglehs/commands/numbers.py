"""What `verify --model` says of the numbers: a line a state, then the next tokens, then the count of faults."""

from __future__ import annotations

from .. import console
from ..schemas.counts import counted
from ..schemas.verified import StateReading, Verified


def show_numbers(found: Verified) -> None:
    """Print the readings on stdout and the faults on stderr."""
    for fault in found.faults:
        console.say(f"fault: {fault}")
    for state in found.states:
        console.out(_state_line(state))
    console.out(
        f"next token   {found.num_next_agree} of {found.num_next_tokens} as the LM head makes it of the last row; "
        f"likeliest token the same in {found.same_token_share:.1%} of {counted(found.num_rows, 'row')}"
        f"{_own(found.own_same_token_share, '.1%')}"
    )
    console.out(
        f"{counted(len(found.samples), 'sample')}, {found.model} by {found.reference}: "
        + counted(len(found.faults), "fault")
    )


def _state_line(state: StateReading) -> str:
    return (
        f"{state.state:<12} nearest {state.nearest}; median error {state.error_median:.2g}"
        f"{_own(state.own_median, '.2g')}, at most {state.allowed:.2g}, in all {state.error_total:.2g}; "
        f"next {state.next_best}, {state.next_best_error:.2g}"
    )


def _own(value: float | None, form: str) -> str:
    return "" if value is None else f" (transformers in bfloat16 {value:{form}})"
