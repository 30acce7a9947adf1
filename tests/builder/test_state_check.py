"""The bit checks: every value that no model computes is found with its row, and no plausible state is refused."""

import numpy as np
import pytest
import torch
import xxhash
from eaglehs.builder.state_check import StateCheck, norm_rows
from hypothesis import given, settings
from hypothesis import strategies as st

T, H = 20, 40


def good_bits(num_tokens: int = T, width: int = H, seed: int = 0) -> np.ndarray:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, width, generator=random).to(torch.bfloat16).view(torch.uint16).numpy().copy()


def checked(bits: np.ndarray, *, name: str = "layer_3", ids: np.ndarray | None = None, step: int = 7) -> StateCheck:
    check = StateCheck(name, np.arange(len(bits), dtype=np.int32) if ids is None else ids)
    for start in range(0, len(bits), step):
        check.update(np.ascontiguousarray(bits[start : start + step]))
    return check


def messages(check: StateCheck) -> list[str]:
    return [fault.message for fault in check.faults()]


@given(st.integers(1, 50), st.integers(4, 70), st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=40)
def test_good_states_have_no_fault_and_the_hash_of_their_bytes(num_tokens, width, step, seed):
    bits = good_bits(num_tokens, width, seed)
    check = checked(bits, step=step)
    assert messages(check) == []
    assert check.xxh3_128 == xxhash.xxh3_128_hexdigest(bits.tobytes())


@given(st.integers(1, 200), st.integers(1, 64))
@settings(max_examples=40)
def test_the_mean_norm_is_that_of_up_to_64_rows_whatever_the_blocks(num_tokens, step):
    bits = good_bits(num_tokens)
    values = torch.from_numpy(bits).view(torch.bfloat16).to(torch.float64)
    rows = norm_rows(num_tokens)
    assert len(rows) == min(num_tokens, 64)
    assert {0, num_tokens - 1} <= set(rows.tolist())
    assert checked(bits, step=step).mean_norm == pytest.approx(values[rows].norm(dim=1).mean().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(0x7F80, "an infinite value"), (0xFF80, "an infinite value"), (0x7FC0, "NaN"), (0x7F81, "NaN"), (0xFFFF, "NaN")],
)
@pytest.mark.parametrize("row", [0, 6, 7, T - 1])
def test_a_value_that_is_not_finite_is_found_with_its_row(pattern, what, row):
    bits = good_bits()
    bits[row, 17] = pattern
    bits[T - 1, 3] = pattern
    [fault] = checked(bits).faults()
    assert (fault.row, fault.message) == (row, f"row {row} of layer_3 holds {what}")


@pytest.mark.parametrize("value", [70000.0, 1e30, -0.0, 1e-40, 3.38e38, -3.38e38])
def test_large_small_and_signed_values_are_fine(value):
    bits = good_bits()
    bits[5, 5] = torch.tensor([value]).to(torch.bfloat16).view(torch.uint16).numpy()[0]
    assert messages(checked(bits)) == []


def test_states_of_zeros_of_either_sign_are_refused():
    bits = np.zeros((T, H), np.uint16)
    bits[::2] = 0x8000
    assert messages(checked(bits)) == ["all values of layer_3 are zero; it was never computed or copied"]


def test_constant_states_are_refused():
    assert "one magnitude" in messages(checked(np.full((T, H), 0x3F80, np.uint16)))[0]
    one_apart = np.full((T, H), 0x3F80, np.uint16)
    one_apart[-1, -1] += 1
    assert "one magnitude" not in " ".join(messages(checked(one_apart)))


def test_a_row_of_zeros_is_refused_but_for_embeddings_of_padding_tokens():
    bits = good_bits()
    bits[9] = 0
    assert messages(checked(bits)) == ["row 9 of layer_3 is all zeros; it was never written"]
    assert messages(checked(bits, name="layer_0")) == []


@pytest.mark.parametrize("step", [1, 2, 7, 64])
def test_rows_that_are_each_there_twice_are_refused(step):
    [fault] = checked(np.repeat(good_bits(T // 2), 2, axis=0), step=step).faults()
    assert fault.row == 1
    assert "repeats row 0" in fault.message
    assert "10 of 19" in fault.message


def test_one_row_for_all_tokens_is_refused():
    [fault] = checked(np.repeat(good_bits(1), T, axis=0)).faults()
    assert "19 of 19" in fault.message


@pytest.mark.parametrize("row", [1, 7, T - 1])
def test_a_single_repeated_row_is_refused_at_block_borders_too(row):
    bits = good_bits()
    bits[row] = bits[row - 1]
    [fault] = checked(bits).faults()
    assert fault.row == row


def test_equal_rows_of_equal_tokens_are_fine():
    bits = np.repeat(good_bits(1), T, axis=0)
    assert messages(checked(bits, ids=np.full(T, 5, np.int32))) == []


def test_a_chance_repeat_in_a_narrow_toy_state_is_fine():
    bits = good_bits(T, 4)
    bits[9] = bits[8]
    assert messages(checked(bits)) == []


def test_a_single_token_of_width_one_is_fine():
    assert messages(checked(good_bits(1, 1))) == []
