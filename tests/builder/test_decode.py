"""Any reader's row becomes the same tensors, bit for bit, or an error that names the column."""

import io
import warnings

import numpy as np
import pytest
import torch
from eaglehs.builder.decode import ColumnError, column_of, decode, is_decoded
from eaglehs.schemas.errors import DataError
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.bits import HOSTILE_BITS, bits_of, hostile_states


def make_row(num_tokens: int = 4, hidden_size: int = 8) -> dict:
    """Return a row as stock `datasets` gives it: numpy arrays of the stored types."""
    return {
        "__key__": "p0",
        "__url__": "data/train-00000.tar",
        "meta.json": {"key": "p0", "id": "P.0"},
        "input_ids.npy": np.arange(num_tokens, dtype=np.int32)[:, None],
        "loss_mask.npy": (np.arange(num_tokens, dtype=np.uint8) % 2)[:, None],
        "layer_3.bf16.npy": hostile_states(num_tokens, hidden_size, seed=3),
        "final.bf16.npy": hostile_states(num_tokens, hidden_size, seed=4),
    }


def as_npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def assert_decodes_to(row: dict, sample: dict) -> None:
    assert sample["key"] == "p0"
    assert sample["input_ids"].dtype == torch.int32
    assert sample["input_ids"].tolist() == row["input_ids.npy"][:, 0].tolist()
    assert sample["loss_mask"].dtype == torch.uint8
    assert sample["loss_mask"].tolist() == row["loss_mask.npy"][:, 0].tolist()
    np.testing.assert_array_equal(bits_of(sample["layer_3"]), row["layer_3.bf16.npy"])
    np.testing.assert_array_equal(bits_of(sample["final"]), row["final.bf16.npy"])


def test_a_row_of_numpy_arrays_becomes_tensors_bit_for_bit():
    row = make_row()
    sample = decode(row)
    assert list(sample) == ["key", "input_ids", "loss_mask", "layer_3", "final"]
    assert_decodes_to(row, sample)


def test_states_share_memory_with_a_writable_row():
    row = make_row()
    sample = decode(row)
    assert sample["layer_3"].data_ptr() == row["layer_3.bf16.npy"].ctypes.data


def test_read_only_memory_is_copied_without_a_warning():
    row = make_row()
    for value in row.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample = decode(row)
    sample["final"].zero_()
    assert row["final.bf16.npy"].any()


def test_raw_members_of_a_shard_are_decoded():
    row = make_row()
    raw = {name: as_npy(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
    assert_decodes_to(row, decode(raw))


def test_what_a_dataloader_made_of_a_row_is_decoded():
    row = make_row()
    as_torch = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in row.items()}
    assert_decodes_to(row, decode(as_torch))


@pytest.mark.parametrize("guess", ["rows of arrays", "plain numbers", "rows of tensors", "flat ids"])
def test_guessed_types_are_decoded(guess: str):
    row = make_row()
    guessed = dict(row)
    for name, value in row.items():
        if not isinstance(value, np.ndarray):
            continue
        if guess == "plain numbers" or (guess == "flat ids" and value.shape[1] > 1):
            guessed[name] = value.tolist()
        elif guess == "flat ids":
            guessed[name] = value[:, 0].tolist()
        else:
            guessed[name] = [torch.from_numpy(r) if guess == "rows of tensors" else r for r in value]
    assert_decodes_to(row, decode(guessed))


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=16))
def test_any_bits_survive(bits: list[int]):
    array = np.array(bits, dtype=np.uint16)[:, None]
    np.testing.assert_array_equal(bits_of(decode({"final.bf16.npy": array})["final"]), array)


def test_hostile_bits_mean_what_they_should():
    array = np.array(HOSTILE_BITS, dtype=np.uint16)[None]
    values = decode({"final.bf16.npy": array})["final"][0]
    assert values.isnan().sum() == 3
    assert values[9].item() == pytest.approx(1e30, rel=0.01)
    assert values[10].item() > 65504


def test_widened_integers_are_refused_and_the_format_is_named():
    row = make_row()
    row["layer_3.bf16.npy"] = row["layer_3.bf16.npy"].astype(np.int64)
    with pytest.raises(ColumnError, match=r"layer_3\.bf16\.npy: int64 values, expected uint16.*with_format") as caught:
        decode(row)
    assert caught.value.column == "layer_3.bf16.npy"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_floats_are_refused_since_bits_are_lost(dtype: type):
    row = make_row() | {"final.bf16.npy": np.zeros((4, 8), dtype=dtype)}
    with pytest.raises(ColumnError, match=r"final\.bf16\.npy: float.* taken for numbers and converted"):
        decode(row)


def test_floats_in_lists_are_refused_too():
    with pytest.raises(ColumnError, match="float64 values"):
        decode(make_row() | {"final.bf16.npy": [[0.5] * 8] * 4})


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("final.bf16.npy", None, "no such member"),
        ("final.bf16.npy", np.zeros(4, np.uint16), r"shape \[4\]"),
        ("final.bf16.npy", np.zeros((4, 8), ">u2"), "expected uint16"),
        ("final.bf16.npy", b"not an array", r"no \.npy array"),
        ("final.bf16.npy", as_npy(np.zeros((4, 8), np.uint16))[:-3], r"no \.npy array"),
        ("final.bf16.npy", [[1, 2], [3]], "different lengths"),
        ("final.bf16.npy", [[70_000] * 8] * 4, "out of uint16's range"),
        ("final.bf16.npy", [], "no rows"),
        ("final.bf16.npy", "text", "type str"),
        ("final.bf16.npy", np.zeros((3, 8), np.uint16), r"3 rows, but input_ids\.npy has 4"),
        ("input_ids.npy", np.zeros((4, 2), np.int32), r"shape \[4, 2\]"),
        ("input_ids.npy", np.zeros((4, 1), np.int64), "int64 values, expected int32"),
        ("input_ids.npy", torch.zeros(4, 1, dtype=torch.bfloat16), "whole numbers"),
        ("loss_mask.npy", np.zeros((4, 1), bool), "bool values, expected uint8"),
    ],
)
def test_a_wrong_column_is_named(column: str, value: object, message: str):
    with pytest.raises(ColumnError, match=message) as caught:
        decode(make_row() | {column: value})
    assert caught.value.column == column


def test_a_row_of_something_else_is_refused_with_its_columns():
    with pytest.raises(DataError, match="text, label"):
        decode({"text": "hello", "label": 1})


def test_a_row_without_some_columns_gives_the_rest():
    row = make_row()
    del row["layer_3.bf16.npy"], row["__key__"], row["meta.json"]
    assert list(decode(row)) == ["key", "input_ids", "loss_mask", "final"]
    assert decode(row)["key"] == ""


def test_the_key_is_found_in_meta_where_the_reader_dropped_it():
    row = make_row()
    del row["__key__"]
    assert decode(row)["key"] == "p0"


def test_columns_have_the_names_of_the_format():
    assert [column_of(name) for name in ("input_ids", "loss_mask", "layer_31", "final")] == [
        "input_ids.npy",
        "loss_mask.npy",
        "layer_31.bf16.npy",
        "final.bf16.npy",
    ]


def test_decoded_samples_are_told_from_rows():
    assert not is_decoded(make_row())
    assert is_decoded(decode(make_row()))
