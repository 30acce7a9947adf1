"""The comparison on made-up numbers: every fault is named as what it is, and bfloat16 noise is none."""

from __future__ import annotations

import re

import pytest
import torch
from eaglehs.extraction.compare import Measured, ModelStates, judge, measure, other_sample_errors, relative_errors

T, H, NUM_LAYERS = 24, 32, 6
NOISE = 0.01


def states_of(seed: int) -> ModelStates:
    """A residual stream that moves a third of its length in each layer."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(T, H, generator=random)  # noqa: E731
    inputs = [draw()]
    for _ in range(NUM_LAYERS):
        inputs.append(inputs[-1] + 0.4 * draw())
    weight = torch.empty(H).uniform_(0.5, 1.5, generator=random)
    norm = lambda x: weight * x / x.square().mean(-1, keepdim=True).sqrt()  # noqa: E731
    final = norm(inputs[-1])
    return ModelStates(inputs=tuple(inputs[:-1]), before_norm=inputs[-1], final=final, normed_twice=norm(final))


def noisy(state_TH: torch.Tensor, seed: int, noise: float = NOISE) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return state_TH + noise * state_TH.norm(dim=-1, keepdim=True) / H**0.5 * torch.randn(T, H, generator=random)


def rounded(exact: ModelStates) -> ModelStates:
    return ModelStates(
        inputs=tuple(noisy(state, k) for k, state in enumerate(exact.inputs)),
        before_norm=noisy(exact.before_norm, 7),
        final=noisy(exact.final, 8),
        normed_twice=None,
    )


EXACT = {key: states_of(seed) for seed, key in enumerate(("a", "b", "c"))}


def stored(key: str) -> dict[str, torch.Tensor]:
    return {"layer_3": noisy(EXACT[key].inputs[3], 20), "final": noisy(EXACT[key].final, 21)}


def judged(samples, *, has_exact: bool = True):
    measured: list[Measured] = []
    others = {}
    for key, states in samples.items():
        measured += measure(key, states, EXACT[key], rounded(EXACT[key]) if has_exact else None)
        rows = {other: EXACT[other].inputs[3] for other in EXACT if other != key}
        others[key, "layer_3"] = other_sample_errors(states["layer_3"], rows)
    return judge(measured, others)


@pytest.mark.parametrize("has_exact", [True, False])
def test_right_rows_have_no_fault_and_their_error_is_told(has_exact):
    readings, faults = judged({key: stored(key) for key in EXACT}, has_exact=has_exact)
    assert faults == ()
    layer, final = readings
    assert (layer.state, layer.nearest, final.nearest) == ("layer_3", "hidden_states[3]", "final")
    assert layer.error_median == pytest.approx(NOISE, rel=0.2)
    assert layer.error_total == pytest.approx(NOISE, rel=0.2)
    assert layer.next_best_error > 10 * NOISE
    assert (layer.own_median is not None) == has_exact
    assert layer.allowed == (pytest.approx(3 * NOISE, rel=0.2) if has_exact else 0.15)


@pytest.mark.parametrize(
    ("state", "put", "message"),
    [
        ("layer_3", lambda e: e.inputs[4], r"layer_3 holds hidden_states\[4\]: captured as output of layer 3"),
        ("layer_3", lambda e: e.inputs[2], r"layer_3 holds hidden_states\[2\]: captured one layer too early"),
        ("layer_3", lambda e: e.inputs[0], r"layer_3 holds hidden_states\[0\]: captured at layer 0"),
        ("layer_3", lambda e: e.before_norm, "layer_3 holds the last layer's output, before the last norm: captured"),
        ("layer_3", lambda e: e.inputs[3].roll(1, 0), r"layer_3 holds the right state of token t-1.*shifted by one"),
        ("layer_3", lambda e: e.inputs[3].roll(-1, 0), r"layer_3 holds the right state of token t\+1.*shifted by one"),
        ("final", lambda e: e.before_norm, "final holds the last layer's output.*: the last norm is missing"),
        ("final", lambda e: e.normed_twice, "final holds.*normed once more: the last norm was applied twice"),
        ("final", lambda e: e.final.roll(1, 0), "final holds the right state of token t-1.*shifted by one"),
        ("final", lambda e: e.inputs[5], r"final holds hidden_states\[5\]: captured at another layer"),
        ("layer_3", lambda e: torch.randn(T, H), "layer_3 holds nothing that this model computes.*another model"),
        ("layer_3", lambda e: noisy(e.inputs[3], 1, 0.1), r"nearest to hidden_states\[3\] as it should be, but 0\.\d+"),
    ],
)
def test_each_fault_is_named_by_what_it_looks_like(state, put, message):
    samples = {key: {**stored(key), state: put(EXACT[key])} for key in EXACT}
    _, faults = judged(samples)
    assert len(faults) == 1
    assert re.search(message, faults[0]), faults
    assert "all 3 samples checked" in faults[0] or "as it should be" in faults[0]


def test_swapped_samples_name_one_another():
    samples = {"a": stored("b"), "b": stored("a"), "c": stored("c")}
    _, faults = judged(samples)
    assert any("layer_3 holds the rows of sample b: samples were swapped (a;" in fault for fault in faults)
    assert any("layer_3 holds the rows of sample a: samples were swapped (b;" in fault for fault in faults)
    assert not any("(c;" in fault for fault in faults)


def test_a_sample_whose_rows_are_in_part_anothers_is_named_with_the_first_row():
    mixed = {name: torch.cat([state[:16], stored("b")[name][16:]]) for name, state in stored("a").items()}
    _, faults = judged({"a": mixed, "b": stored("b")})
    assert [fault.split(":")[0] for fault in faults] == ["layer_3 of a", "final of a"]
    assert all("8 of 24 rows are not this model's for these tokens, the first is row 16" in fault for fault in faults)


def test_two_rows_whose_experts_flipped_are_no_fault():
    flipped = stored("a")
    flipped["layer_3"][5:7] = torch.randn(2, H)
    _, faults = judged({"a": flipped, "b": stored("b")})
    assert faults == ()


def test_layers_that_hardly_differ_are_said_to_be_too_alike():
    exact = EXACT["a"]
    inputs = (*exact.inputs[:4], exact.inputs[3] * 1.001, exact.inputs[5])
    alike = ModelStates(inputs=inputs, before_norm=exact.before_norm, final=exact.final, normed_twice=None)
    _, faults = judge(measure("a", stored("a"), alike, None), {})
    assert len(faults) == 1
    assert "hidden_states[4]: too alike to tell which of them it is" in faults[0]


def test_a_sample_of_one_token_is_measured_without_shifts():
    one = ModelStates(
        inputs=tuple(state[:1] for state in EXACT["a"].inputs),
        before_norm=EXACT["a"].before_norm[:1],
        final=EXACT["a"].final[:1],
        normed_twice=None,
    )
    _, faults = judge(measure("a", {name: state[:1] for name, state in stored("a").items()}, one, None), {})
    assert faults == ()


def test_a_row_that_is_zero_has_an_error_that_is_a_number():
    assert relative_errors(torch.ones(1, 4), torch.zeros(1, 4)).tolist() == [2.0]
