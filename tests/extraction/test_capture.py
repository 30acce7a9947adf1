"""Which rows of which batch: ours, of the prompt, once, and only from a batch that can be understood."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eaglehs.extraction.capture import PROMPT_TOKENS, Capture, pieces_of, prompt_lengths
from eaglehs.extraction.sglang_view import CaptureRefusedError

from tests.fakes.sglang import HIDDEN, FakeBatch, ForwardMode, batch_of

A, B = "eh-run-a-0", "eh-run-b-0"
Row = tuple[str, int, int, int, int | None]


def rows_of(batch: FakeBatch, prefix: str = "eh-") -> list[Row]:
    return [(p.name.rid, p.name.start, p.name.end, p.first, p.prompt_tokens) for p in pieces_of(batch, prefix)]


def knowing(batch: FakeBatch, **prompts: int) -> FakeBatch:
    setattr(batch, PROMPT_TOKENS, {f"eh-run-{key}-0": length for key, length in prompts.items()})
    return batch


def test_chunks_of_several_requests_are_told_apart_and_foreign_ones_passed_over() -> None:
    batch = batch_of((A, 64, 20), ("HEALTH_CHECK_1", 0, 5), (B, 0, 39), ("0f3a", 0, 2))
    assert rows_of(batch) == [(A, 64, 84, 0, None), (B, 0, 39, 25, None)]


def test_decode_rows_of_a_mixed_batch_are_left_out() -> None:
    batch = knowing(batch_of((A, 64, 36), (B, 40, 1), mode=ForwardMode.MIXED), a=200, b=40)
    assert rows_of(batch) == [(A, 64, 100, 0, 200)]


def test_a_last_chunk_of_one_row_is_kept_even_among_decode_rows() -> None:
    batch = knowing(batch_of((A, 128, 1), (B, 41, 1), mode=ForwardMode.MIXED), a=129, b=40)
    assert rows_of(batch) == [(A, 128, 129, 0, 129)]


def test_rows_that_a_retracted_request_had_generated_are_cut_off() -> None:
    batch = knowing(batch_of((A, 0, 50)), a=40)
    assert rows_of(batch) == [(A, 0, 40, 0, 40)]


def test_only_this_runs_requests_are_kept_where_the_prefix_says_so() -> None:
    batch = batch_of(("eh-other-a-0", 0, 5), (A, 0, 5))
    assert [row[0] for row in rows_of(batch, "eh-run-")] == [A]


@pytest.mark.parametrize("rid", ["eh-../evil", "eh-run-a", "eh-run-a.b-0", "eh-run-A-0", "eh-run-/etc-0", "eh-"])
def test_an_unsafe_request_id_is_refused_with_a_note(rid: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert rows_of(batch_of((rid, 0, 5), (A, 0, 5))) == [(A, 0, 5, 5, None)]
    assert repr(rid) in caplog.text


def test_a_mixed_batch_without_prompt_lengths_is_refused() -> None:
    with pytest.raises(CaptureRefusedError, match=r"eh-run-a-0: its prompt length is not known.*enable-mixed-chunk"):
        rows_of(batch_of((A, 64, 36), mode=ForwardMode.MIXED))


def test_prompt_lengths_are_those_of_our_requests_as_sent() -> None:
    requests = [
        SimpleNamespace(rid=A, origin_input_ids=[1, 2, 3], output_ids=[4]),
        SimpleNamespace(rid="someone", origin_input_ids=[1]),
    ]
    assert prompt_lengths(requests, "eh-") == {A: 3}
    assert prompt_lengths(None, "eh-") == {}


class Taken:
    """Keeps what was handed to the ring."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[torch.Tensor], torch.Tensor]] = []

    def __call__(self, pieces: Any, states: Any, ids: torch.Tensor) -> None:
        self.calls.append((pieces, list(states), ids))


def capture_into(put: Taken | None) -> Capture:
    return Capture(rid_prefix="eh-", layers=(1, 4), hidden_size=HIDDEN, put=put)


def state(num_rows: int, fill: float = 0.0) -> torch.Tensor:
    return torch.full((num_rows, HIDDEN), fill).bfloat16()


@pytest.mark.parametrize("form", ["list", "packed"])
def test_both_forms_of_states_reach_the_ring_in_the_order_of_layers_with_final_last(form: str) -> None:
    taken = Taken()
    capture = capture_into(taken)
    batch = batch_of((A, 0, 5))
    aux = [state(5, 1), state(5, 4)]
    capture.before_forward(batch)
    capture.take(state(5, -1), torch.cat(aux, dim=-1) if form == "packed" else aux, [batch])
    capture.after_forward()
    [(pieces, states, ids)] = taken.calls
    assert [float(found[0, 0]) for found in states] == [1.0, 4.0, -1.0]
    assert all(found.shape == (5, HIDDEN) for found in states)
    assert ids is batch.input_ids
    assert [found.name.rid for found in pieces] == [A]


def test_a_copy_of_the_batch_with_the_same_requests_is_the_same_batch() -> None:
    taken = Taken()
    capture = capture_into(taken)
    batch, copy = batch_of((A, 0, 5)), batch_of((A, 0, 5))
    capture.before_forward(batch)
    capture.take(state(5), [state(5), state(5)], ["ids", copy])
    assert len(taken.calls) == 1


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_other_forward_modes_are_left_alone(mode: ForwardMode) -> None:
    taken = Taken()
    capture = capture_into(taken)
    batch = batch_of((A, 0, 5), mode=mode)
    capture.before_forward(batch)
    capture.take(state(5), [], [batch])
    capture.after_forward()
    assert taken.calls == []


def test_a_rank_that_does_not_write_and_a_stopped_capture_take_nothing() -> None:
    taken = Taken()
    stopped = capture_into(taken)
    stopped.stop()
    for capture in (stopped, capture_into(None)):
        batch = batch_of((A, 0, 5))
        capture.before_forward(batch)
        capture.take(state(5), "anything", [batch])
        capture.after_forward()
    assert taken.calls == []


def test_a_batch_whose_rows_were_not_taken_is_an_error_that_names_the_request() -> None:
    capture = capture_into(Taken())
    capture.before_forward(batch_of((A, 0, 5)))
    with pytest.raises(CaptureRefusedError, match=f"{A} ran without passing"):
        capture.after_forward()
    capture.after_forward()


def test_a_stand_in_batch_is_refused_because_its_rows_are_padded() -> None:
    capture = capture_into(Taken())
    capture.before_forward(batch_of((A, 0, 13)))
    stand_in = FakeBatch(None, [16], [0], torch.zeros(16))
    with pytest.raises(CaptureRefusedError, match=r"stand-in batch.*--cuda-graph-backend-prefill disabled"):
        capture.take(state(16), [state(16), state(16)], [stand_in])


@pytest.mark.parametrize(
    ("hidden", "aux", "words"),
    [
        (state(5), [state(5)], "gave 1 state for 2 layers"),
        (state(5), [state(5)] * 3, "gave 3 states for 2 layers"),
        (state(5), torch.zeros(5, 3 * HIDDEN).bfloat16(), "24 wide, expected 2 x 8"),
        (state(5), None, "gave a NoneType for 2 layers"),
        (state(5).float(), [state(5)] * 2, "computes in float32"),
        (state(5), [state(5).half()] * 2, "computes in float16"),
        (state(4), [state(5)] * 2, r"\[4, 8\] for a batch of 5 rows"),
        (state(5), [state(3), state(5)], r"\[3, 8\] for a batch of 5 rows"),
        (state(5), [torch.zeros(5, 6).bfloat16()] * 2, r"\[5, 6\]"),
    ],
)
def test_states_that_are_not_what_was_asked_for_are_refused(hidden: Any, aux: Any, words: str) -> None:
    taken = Taken()
    capture = capture_into(taken)
    batch = batch_of((A, 0, 5))
    capture.before_forward(batch)
    with pytest.raises(CaptureRefusedError, match=words):
        capture.take(hidden, aux, [batch])
    assert taken.calls == []
