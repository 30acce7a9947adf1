"""Stored states against what a model computes for the same tokens: numbers in, readings and named faults out.

    relative_errors   row by row
    measure           one sample: the errors of each stored state against everything it could be by mistake
    judge             all samples: what each state is nearest to, how far off, and what a fault looks like

Errors are judged by the median over rows: in a mixture of experts single rows whose expert choice flips lie as far
off as rows of another token, with any two kernels. What bfloat16 explains is measured where it can be: transformers'
own bfloat16 states against its float32 ones, for the same samples.

Shape legend: T tokens, H hidden width; all float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..schemas.counts import counted
from ..schemas.states import FINAL
from ..schemas.verified import StateReading
from .compare_causes import BEFORE_NORM, NORMED_TWICE, OTHER_SAMPLE, ROW_AHEAD, ROW_BEHIND, explain

OWN_FACTOR = 3.0
"""Stored states may be so many times as far from float32 as transformers' own bfloat16 states are, by the worst of the
samples: another kernel sums in another order, and one expert flip early in a prompt moves all its later rows."""

ERROR_FLOOR = 0.01
"""Always allowed: 2.5 steps of bfloat16. Embeddings have no error of their own."""

DEFAULT_ALLOWED = 0.15
"""Allowed where float32 does not fit. DeepSeek-V3 on a GPU lay 0.02 to 0.08 from transformers, neighbouring layers 0.22
and more."""

MARGIN = 1.5
"""The next-best layer must be so many times as far as the right one, or the layers can't be told apart."""

FAR = 0.5
"""A row that is farther off is another token's, or one whose experts flipped. States of unrelated tokens lie about 1.4
apart."""

FAR_SHARE = 0.1
"""Share of a sample's rows that may be far, where transformers' own bfloat16 states have no more."""

COMPARED_ROWS = 128
"""Rows of a sample that are kept to tell whether another sample holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """What one model computes for one sample."""

    inputs: tuple[Tensor, ...]
    """Entry k is what enters layer k, [T, H]."""

    before_norm: Tensor
    """The last layer's output, [T, H]."""

    final: Tensor
    """The LM head's input, [T, H]."""

    normed_twice: Tensor | None
    """The last norm applied to `final`, [T, H]; None where the model's norm was not found."""

    def named(self) -> dict[str, Tensor]:
        """Return all of them by name, in the order of the model."""
        found = {f"hidden_states[{k}]": state_TH for k, state_TH in enumerate(self.inputs)}
        found |= {BEFORE_NORM: self.before_norm, FINAL: self.final}
        return found if self.normed_twice is None else {**found, NORMED_TWICE: self.normed_twice}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One stored state of one sample, measured."""

    key: str
    state: str
    errors: dict[str, Tensor]
    """Name of what it could be -> relative error of each row, [T]."""

    own: Tensor | None
    """transformers' own bfloat16 errors, [T]."""

    squares: tuple[float, float]
    """Sums over all rows: of the squared difference to the right state, and of that state squared."""

    @property
    def expected(self) -> str:
        """The name of what it should be."""
        return expected_name(self.state)

    def medians(self) -> dict[str, float]:
        """Return the median error against each."""
        return {name: float(errors_T.median()) for name, errors_T in self.errors.items()}


def expected_name(state: str) -> str:
    """Return what a stored state must be: `layer_4` is `hidden_states[4]`, `final` is `final`."""
    return FINAL if state == FINAL else f"hidden_states[{state.removeprefix('layer_')}]"


def relative_errors(found_TH: Tensor, wanted_TH: Tensor) -> Tensor:
    """Return |found - wanted| / |wanted| of each row, [T]; of a row that is zero in `wanted`, the length of `found`."""
    wanted_T = torch.linalg.vector_norm(wanted_TH, dim=-1)
    errors_T: Tensor = torch.linalg.vector_norm(found_TH - wanted_TH, dim=-1) / wanted_T.where(wanted_T > 0, 1.0)
    return errors_T


def measure(
    key: str, stored: Mapping[str, Tensor], exact: ModelStates, rounded: ModelStates | None
) -> tuple[Measured, ...]:
    """Measure the stored states of one sample, name -> [T, H], against all that they could be.

    `exact` is the better of what transformers computes; `rounded` its bfloat16 states where `exact` is float32.
    """
    candidates, own = exact.named(), rounded.named() if rounded else {}
    return tuple(_measure(key, state, state_TH.float(), candidates, own) for state, state_TH in stored.items())


def _measure(
    key: str, state: str, stored_TH: Tensor, candidates: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> Measured:
    expected = expected_name(state)
    wanted_TH = candidates[expected]
    # The expected one first: where rows are equal, as embeddings of one token are, it wins.
    errors = {expected: relative_errors(stored_TH, wanted_TH)}
    errors |= {name: relative_errors(stored_TH, TH) for name, TH in candidates.items() if name != expected}
    if len(stored_TH) > 2:
        errors[ROW_AHEAD] = relative_errors(stored_TH[:-1], wanted_TH[1:])
        errors[ROW_BEHIND] = relative_errors(stored_TH[1:], wanted_TH[:-1])
    squares = (float((stored_TH - wanted_TH).square().sum()), float(wanted_TH.square().sum()))
    own_T = relative_errors(own[expected], wanted_TH) if own else None
    return Measured(key=key, state=state, errors=errors, own=own_T, squares=squares)


def other_sample_errors(stored_TH: Tensor, others: Mapping[str, Tensor]) -> dict[str, float]:
    """Return name -> median error of a stored state against the rows that other samples should hold."""
    errors = {}
    for key, other_TH in others.items():
        rows = min(len(stored_TH), len(other_TH))
        errors[f"{OTHER_SAMPLE}{key}"] = float(
            relative_errors(stored_TH[:rows].float(), other_TH[:rows].float()).median()
        )
    return errors


def judge(
    measured: Sequence[Measured], others: Mapping[tuple[str, str], Mapping[str, float]]
) -> tuple[tuple[StateReading, ...], tuple[str, ...]]:
    """Return a reading of each state and all faults, over the samples measured.

    `others` has, by key and state, what `other_sample_errors` found.
    """
    readings, faults = [], []
    for state in dict.fromkeys(item.state for item in measured):
        items = [item for item in measured if item.state == state]
        reading = _read(items)
        readings.append(reading)
        found = _misplaced(items, others) or _inexact(reading) or _far_rows(items)
        faults += found
    return tuple(readings), tuple(faults)


def _read(items: Sequence[Measured]) -> StateReading:
    names = [name for name in items[0].errors if all(name in item.errors for item in items)]
    medians = {name: float(torch.cat([item.errors[name] for item in items]).median()) for name in names}
    expected = items[0].expected
    # A second norm changes little where the norm's weights are all alike: it can't be asked to be far.
    places = {name: error for name, error in medians.items() if name not in (ROW_AHEAD, ROW_BEHIND, NORMED_TWICE)}
    nearest = min(medians, key=medians.__getitem__)
    next_best = min((name for name in places if name != nearest), key=places.__getitem__)
    own = [item.own for item in items if item.own is not None]
    different, whole = (sum(item.squares[i] for item in items) for i in (0, 1))
    return StateReading(
        state=items[0].state,
        error_median=medians[expected],
        error_total=(different / whole) ** 0.5 if whole else different**0.5,
        own_median=float(torch.cat(own).median()) if own else None,
        allowed=_allowed(own),
        nearest=nearest,
        next_best=next_best,
        next_best_error=places[next_best],
    )


def _allowed(own: Sequence[Tensor]) -> float:
    if not own:
        return DEFAULT_ALLOWED
    return max(ERROR_FLOOR, OWN_FACTOR * max(float(errors_T.median()) for errors_T in own))


def _misplaced(items: Sequence[Measured], others: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """Return a fault for each thing that a state is instead of what it should be, with the samples that show it."""
    looks_like: dict[str, list[str]] = {}
    errors: dict[str, tuple[float, float]] = {}
    for item in items:
        medians = item.medians()
        nearest = min(medians, key=medians.__getitem__)
        if nearest == item.expected and medians[nearest] <= FAR:
            continue
        found = {**medians, **others.get((item.key, item.state), {})}
        nearest = min(found, key=found.__getitem__)
        if found[nearest] > FAR:
            nearest = ""  # it is nothing that this model computes for these tokens
        looks_like.setdefault(nearest, []).append(item.key)
        errors.setdefault(nearest, (found[nearest] if nearest else min(found.values()), medians[item.expected]))
    state, num_samples = items[0].state, len(items)
    return [
        f"{explain(state, name, is_everywhere=len(keys) == num_samples)} ({_which(keys, num_samples)}; median error "
        f"{errors[name][0]:.3g}, and {errors[name][1]:.3g} from {items[0].expected})"
        for name, keys in looks_like.items()
    ]


def _inexact(reading: StateReading) -> list[str]:
    right = expected_name(reading.state)
    if reading.error_median > reading.allowed:
        yardstick = (
            f"{OWN_FACTOR:g} times transformers' own bfloat16 error"
            if reading.own_median is not None
            else "the default bound"
        )
        return [
            (
                f"{reading.state} is nearest to {right} as it should be, but {reading.error_median:.3g} from it by the "
                f"median, more than {reading.allowed:.3g} ({yardstick}): another revision or quantization of the "
                "model, or states that were rounded more than once"
            )
        ]
    if reading.nearest == right and reading.next_best_error < MARGIN * reading.error_median:
        return [
            (
                f"{reading.state} is {reading.error_median:.3g} from {right} and {reading.next_best_error:.3g} from "
                f"{reading.next_best}: too alike to tell which of them it is"
            )
        ]
    return []


def _far_rows(items: Sequence[Measured]) -> list[str]:
    own_share = max((_far_share(item.own) for item in items if item.own is not None), default=0.0)
    allowed = max(FAR_SHARE, OWN_FACTOR * own_share)
    faults = []
    for item in items:
        far_T = item.errors[item.expected] > FAR
        if int(far_T.sum()) > max(2, allowed * len(far_T)):
            faults.append(
                f"{item.state} of {item.key}: {int(far_T.sum()):,} of {counted(len(far_T), 'row is', 'rows are')} not "
                f"this model's for these tokens, the first is row {int(far_T.nonzero()[0])}: "
                "its rows are in part another sample's"
            )
    return faults


def _far_share(errors_T: Tensor) -> float:
    return float((errors_T > FAR).float().mean())


def _which(keys: Iterable[str], num_samples: int) -> str:
    named = list(keys)
    if len(named) == num_samples:
        return f"all {counted(num_samples, 'sample')} checked" if num_samples > 1 else named[0]
    return ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
