"""Which states there are and which numbers name them."""

import pytest
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.states import (
    array_specs,
    bytes_per_token,
    check_layers,
    default_layers,
    is_state_name,
    layers_of,
    state_names,
)


def test_kimi_k25_has_the_bytes_a_token_of_the_reference_run():
    states_only = sum(spec.row_bytes for spec in array_specs((3, 31, 59), 7168) if spec.is_state)
    assert states_only == 57_344
    assert bytes_per_token((3, 31, 59), 7168) == 57_344 + 4 + 1


def test_arrays_come_in_the_order_of_the_format():
    assert [spec.member for spec in array_specs((3, 31, 59), 7168)] == [
        "input_ids.npy",
        "loss_mask.npy",
        "layer_3.bf16.npy",
        "layer_31.bf16.npy",
        "layer_59.bf16.npy",
        "final.bf16.npy",
    ]


@pytest.mark.parametrize("layers", [(2, 30, 61), (-1,), (2, 2, 5), (), (61,)])
def test_layers_that_name_no_state_of_the_model_are_refused(layers):
    with pytest.raises(UsageError, match=r"layer"):
        check_layers(layers, 61)


def test_layers_are_kept_ascending():
    assert check_layers((59, 3, 31), 61) == (3, 31, 59)
    assert check_layers((0, 60), 61) == (0, 60)


def test_the_default_is_the_rule_of_sglang_and_eagle():
    assert default_layers(61) == (2, 30, 58)
    assert default_layers(8) == (2, 4, 5)


@pytest.mark.parametrize("num_layers", [1, 4, 5])
def test_a_shallow_model_has_no_default_layers(num_layers):
    with pytest.raises(UsageError, match="Give --layers"):
        default_layers(num_layers)


@pytest.mark.parametrize(
    ("name", "is_state"),
    [("final", True), ("layer_3", True), ("layer_03", False), ("layer_", False), ("input_ids", False)],
)
def test_state_names_are_told_from_others(name, is_state):
    assert is_state_name(name) is is_state


def test_layers_are_found_among_the_names_of_arrays():
    assert layers_of(("input_ids", "loss_mask", *state_names((3, 31, 59)), "layer_x")) == (3, 31, 59)
