"""Batches: everything of a sample is padded and cut together."""

import numpy as np
import pytest
import torch
from eaglehs.builder.collate import BatchError, collate
from eaglehs.schemas.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.bits import bits_of, hostile_states


def make_sample(num_tokens: int, key: str = "p0", hidden_size: int = 8) -> dict:
    states = torch.from_numpy(hostile_states(num_tokens, hidden_size, seed=num_tokens)).view(torch.bfloat16)
    return {
        "key": key,
        "input_ids": torch.arange(1, num_tokens + 1, dtype=torch.int32),
        "loss_mask": torch.ones(num_tokens, dtype=torch.uint8),
        "layer_3": states,
        "final": states.clone(),
    }


def test_three_lengths_are_padded_and_cut_together():
    batch = collate([make_sample(3, "a"), make_sample(4, "b"), make_sample(7, "c")], max_tokens=5)
    assert batch["key"] == ["a", "b", "c"]
    assert batch["lengths"].tolist() == [3, 4, 5]
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 0], [1, 2, 3, 4, 5]]
    assert batch["loss_mask"].sum(dim=1).tolist() == [3, 4, 5]
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 4, 5]
    assert batch["final"].shape == batch["layer_3"].shape == (3, 5, 8)


def test_states_stay_bfloat16_bit_for_bit_and_padding_is_zero():
    samples = [make_sample(3), make_sample(7)]
    batch = collate(samples)
    assert batch["final"].dtype == torch.bfloat16
    np.testing.assert_array_equal(bits_of(batch["final"][0, :3]), bits_of(samples[0]["final"]))
    np.testing.assert_array_equal(bits_of(batch["final"][1]), bits_of(samples[1]["final"]))
    assert not bits_of(batch["final"][0, 3:]).any()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 12) | st.none())
def test_no_padded_token_is_ever_trained_on(lengths: list[int], max_tokens: int | None):
    batch = collate([make_sample(n) for n in lengths], max_tokens=max_tokens)
    kept = [min(n, max_tokens or n) for n in lengths]
    assert batch["lengths"].tolist() == kept
    assert batch["input_ids"].shape == (len(lengths), max(kept))
    assert torch.equal(batch["loss_mask"].bool(), batch["attention_mask"].bool())


def test_rows_of_a_stock_reader_are_decoded_on_the_way():
    row = {
        "__key__": "p1",
        "input_ids.npy": np.arange(3, dtype=np.int32)[:, None],
        "final.bf16.npy": hostile_states(3, 8),
    }
    batch = collate([row, row])
    assert batch["key"] == ["p1", "p1"]
    assert batch["final"].dtype == torch.bfloat16


def test_the_batch_is_new_memory():
    sample = make_sample(3)
    batch = collate([sample])
    batch["final"].zero_()
    assert bits_of(sample["final"]).any()


def test_samples_of_two_datasets_are_refused():
    with pytest.raises(BatchError, match="final of sample 'b' is") as caught:
        collate([make_sample(3, "a"), {**make_sample(3, "b"), "final": torch.zeros(3, 16, dtype=torch.bfloat16)}])
    assert "different datasets" in str(caught.value)


def test_samples_with_different_states_are_refused():
    other = make_sample(3, "b")
    other["layer_5"] = other.pop("layer_3")
    with pytest.raises(BatchError, match="'a' and 'b' have different arrays"):
        collate([make_sample(3, "a"), other])


def test_float32_among_bfloat16_is_refused():
    with pytest.raises(BatchError, match=r"torch\.float32"):
        collate([make_sample(3), {**make_sample(3), "final": torch.zeros(3, 8)}])


def test_a_sample_whose_mask_was_not_cut_is_refused():
    with pytest.raises(BatchError, match="loss_mask of sample 'a' has 5 rows"):
        collate([{**make_sample(3, "a"), "loss_mask": torch.ones(5, dtype=torch.uint8)}])


def test_an_empty_batch_and_a_useless_limit_are_refused():
    with pytest.raises(BatchError, match="no samples"):
        collate([])
    with pytest.raises(UsageError, match="max_tokens is 0"):
        collate([make_sample(3)], max_tokens=0)
