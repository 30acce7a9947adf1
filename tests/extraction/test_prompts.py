"""From a prompt source to checked prompts: what is kept, what is left out and why, what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from eaglehs.extraction.chat import ChatTemplateError
from eaglehs.extraction.model_facts import read_model_facts
from eaglehs.extraction.prompt_rows import RowError
from eaglehs.extraction.prompts import (
    LossMaskMode,
    NoPromptsError,
    PreparedPrompts,
    PromptOptions,
    max_member_tokens,
    prepare_prompts,
)
from eaglehs.extraction.row_outcome import SkipReason, WarningKind
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.keys import make_key
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.prompt import Prompt
from eaglehs.schemas.run import ModelFacts
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import tokenizers as kinds
from tests.factories.tokenizers import chat, fast_tokenizer, save_model_folder

MODEL = ModelFacts(
    name="no-such-model",
    revision="local-0",
    architecture="X",
    num_layers=8,
    hidden_size=16,
    vocab_size=163840,
    max_position=4096,
)
"""A model whose tokenizer can't be loaded: rows of ids must not try."""


class Heard:
    """Progress that counts."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def advance(self, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        self.samples.append(num_tokens)
        assert num_samples == 1

    def note(self, message: str) -> None:
        raise AssertionError(message)


def _source(tmp_path: Path, rows: list[dict[str, Any]], name: str = "p.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def _prepare(tmp_path: Path, rows: list[dict[str, Any]], model: ModelFacts = MODEL, **options: Any) -> PreparedPrompts:
    return prepare_prompts(_source(tmp_path, rows), model, PromptOptions(**options), Silent())


def _model_with(**changes: Any) -> ModelFacts:
    fields = {name: getattr(MODEL, name) for name in ModelFacts.__slots__}
    return ModelFacts(**(fields | changes))


def _ids(prompt: Prompt) -> list[int]:
    return np.asarray(prompt.input_ids).tolist()


def _mask(prompt: Prompt) -> list[int]:
    return np.asarray(prompt.loss_mask).tolist()


@pytest.fixture
def chat_model(tmp_path: Path) -> ModelFacts:
    return read_model_facts(str(save_model_folder(tmp_path / "model", fast_tokenizer(kinds.KIMI))))


def test_rows_of_ids_need_no_tokenizer(tmp_path: Path):
    heard = Heard()
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"id": "Other One", "input_ids": [4], "loss_mask": [1]}]
    found = prepare_prompts(_source(tmp_path, rows), MODEL, PromptOptions(), heard)
    first, second = found.prompts
    assert (first.key, first.id, first.source) == ("00000001", "00000001", "p.jsonl:1")
    assert (second.key, second.id) == (make_key("Other One"), "Other One")
    assert np.asarray(first.input_ids).dtype == np.int32
    assert np.asarray(first.loss_mask).dtype == np.uint8
    assert (_ids(first), _mask(first)) == ([1, 2, 3], [0, 1, 1])
    facts = found.facts
    assert (facts.num_prompts, facts.num_tokens, facts.num_trainable) == (2, 4, 3)
    assert (facts.loss_mask, facts.tokenizer_hash, facts.template_hash, facts.skipped) == ("given", "", "", {})
    assert facts.source == "p.jsonl", "a published dataset does not tell the way to the file"
    assert heard.samples == [3, 1]


def test_of_a_folders_config_and_split_a_published_dataset_does_not_tell_the_way_to_it_either(tmp_path: Path):
    (tmp_path / "set").mkdir()
    _source(tmp_path / "set", [{"input_ids": [1, 2]}], "train.jsonl")
    found = prepare_prompts(f"{tmp_path / 'set'}/:default:train", MODEL, PromptOptions(), Silent())
    assert (found.facts.source, found.prompts[0].source) == ("set:default:train", "set:default:train:1")


def test_conversations_are_rendered_once_and_masked(tmp_path: Path, chat_model: ModelFacts):
    messages = chat("user: Hello there!", "assistant: I am fine")
    sharegpt = [{"from": "human", "value": "Hello there!"}, {"from": "gpt", "value": "I am fine"}]
    found = _prepare(tmp_path, [{"messages": messages}, {"conversations": sharegpt}], chat_model)
    first, second = found.prompts
    expected = fast_tokenizer().apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert _ids(first) == _ids(second) == expected
    assert (
        fast_tokenizer().decode(np.asarray(first.input_ids)[np.asarray(first.loss_mask) == 1]) == "I am fine<|im_end|>"
    )
    assert len(found.facts.tokenizer_hash) == len(found.facts.template_hash) == 64
    assert found.facts.loss_mask == "assistant"
    assert found.warnings == {}


def test_text_and_ids_without_turns_are_trained_whole_with_a_warning(tmp_path: Path, chat_model: ModelFacts):
    rows = [{"text": "Hello there!"}, {"input_ids": [1, 2]}]
    found = _prepare(tmp_path, rows, chat_model)
    assert all(all(_mask(prompt)) for prompt in found.prompts)
    assert found.facts.loss_mask == "all"
    assert found.facts.template_hash == ""
    assert found.warnings == {f"{WarningKind.NO_TURNS.value} (rows 1, 2)": 2}
    assert _prepare(tmp_path, rows, chat_model, loss_mask=LossMaskMode.ALL).warnings == {}


def test_each_reason_to_leave_a_row_out_is_counted_with_its_values(tmp_path: Path):
    model = _model_with(max_position=10, vocab_size=163607, name="kimi")
    rows = [
        {"id": "good", "input_ids": [1, 163606], "loss_mask": [0, 1]},
        {"id": "empty", "input_ids": []},
        {"id": "untrained", "input_ids": [1, 2], "loss_mask": [0, 0]},
        {"id": "reserved", "input_ids": [5, 163607], "loss_mask": [1, 1]},
        {"id": "negative", "input_ids": [-1], "loss_mask": [1]},
        {"id": "good", "input_ids": [3], "loss_mask": [1]},
        {"id": "long", "input_ids": [1] * 10},
        {"id": "no text", "text": ""},
        {"id": "fits", "input_ids": [1] * 9},
    ]
    found = _prepare(tmp_path, rows, model)
    assert [prompt.id for prompt in found.prompts] == ["good", "fits"]
    assert [(row.row, row.id, row.reason) for row in found.skipped] == [
        (2, "empty", SkipReason.EMPTY),
        (3, "untrained", SkipReason.NO_TRAINABLE),
        (4, "reserved", SkipReason.OUTSIDE_VOCABULARY),
        (5, "negative", SkipReason.OUTSIDE_VOCABULARY),
        (6, "good", SkipReason.DUPLICATE_ID),
        (7, "long", SkipReason.LONGER_THAN_CONTEXT),
        (8, "no text", SkipReason.EMPTY),
    ]
    details = {row.id: row.detail for row in found.skipped}
    assert details["reserved"] == "id 163607 at position 1; kimi has a vocabulary of 163607"
    assert details["good"] == "'good' is row 1's already"
    assert details["long"].startswith("10 tokens; kimi can be given 9")
    assert found.facts.skipped == {
        "empty": 2,
        "token outside the vocabulary": 2,
        "duplicate id": 1,
        "longer than the context": 1,
        "no trainable token": 1,
    }


def test_reserved_slots_of_the_configs_vocabulary_are_good_ids(tmp_path: Path):
    reserved = list(range(163584, 163840))
    found = _prepare(tmp_path, [{"input_ids": reserved}])
    assert _ids(found.prompts[0]) == reserved
    with pytest.raises(NoPromptsError, match="id 163607 at position 23; kimi has a vocabulary of 163607"):
        _prepare(tmp_path, [{"input_ids": reserved}], _model_with(vocab_size=163607, name="kimi"))


def test_an_id_beyond_int32_does_not_wrap_round(tmp_path: Path):
    with pytest.raises(NoPromptsError, match=f"id {2**32 + 5} at position 0"):
        _prepare(tmp_path, [{"input_ids": [2**32 + 5]}])


def test_two_ids_with_one_key_are_told_apart_from_one_id_twice(tmp_path: Path):
    other = "Some Id"
    rows = [{"id": other, "input_ids": [1]}, {"id": make_key(other), "input_ids": [2]}]
    found = _prepare(tmp_path, rows)
    assert [row.reason for row in found.skipped] == [SkipReason.DUPLICATE_KEY]


def test_a_row_that_is_left_out_does_not_take_its_id(tmp_path: Path):
    rows = [{"id": "a", "input_ids": []}, {"id": "a", "input_ids": [1]}]
    assert [prompt.source for prompt in _prepare(tmp_path, rows).prompts] == ["p.jsonl:2"]


def test_a_prompt_too_long_for_one_member_is_left_out_even_if_the_context_is_longer(tmp_path: Path):
    wide = _model_with(hidden_size=2**27, max_position=1000)
    assert max_member_tokens(wide) == 7
    found = _prepare(tmp_path, [{"input_ids": [1] * 8}, {"input_ids": [1] * 7}], wide)
    assert [prompt.num_tokens for prompt in found.prompts] == [7]
    assert found.skipped[0].reason is SkipReason.LONGER_THAN_MEMBER
    assert max_member_tokens(_model_with(hidden_size=7168)) == 149_796


def test_max_tokens_cuts_ids_and_mask_together(tmp_path: Path):
    rows = [{"input_ids": list(range(1, 9)), "loss_mask": [0, 0, 1, 1, 0, 1, 1, 1]}, {"input_ids": [1, 2, 3]}]
    found = _prepare(tmp_path, rows, max_tokens=5)
    assert (_ids(found.prompts[0]), _mask(found.prompts[0])) == ([1, 2, 3, 4, 5], [0, 0, 1, 1, 0])
    assert found.prompts[1].num_tokens == 3
    assert found.facts.max_tokens == 5
    assert found.warnings[f"{WarningKind.CUT.value} (row 1)"] == 1


def test_a_cut_that_leaves_no_answer_leaves_the_row_out(tmp_path: Path, chat_model: ModelFacts):
    long = {"messages": chat("user: " + "word " * 100, "assistant: yes")}
    short = {"messages": chat("user: word", "assistant: yes")}
    found = _prepare(tmp_path, [long, short], chat_model, max_tokens=64)
    assert [prompt.source for prompt in found.prompts] == ["p.jsonl:2"]
    assert found.skipped[0].reason is SkipReason.NO_TRAINABLE
    assert found.skipped[0].detail == "the loss mask is 0 for all of the first 64 tokens"


@settings(max_examples=30)
@given(
    rows=st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=20), min_size=1),
    max_tokens=st.integers(1, 25),
)
def test_any_cut_keeps_ids_and_mask_equally_long_and_the_same_prefix(
    rows: list[list[tuple[int, int]]], max_tokens: int, tmp_path_factory: pytest.TempPathFactory
):
    source = [{"input_ids": [a for a, _ in row], "loss_mask": [b for _, b in row]} for row in rows]
    wanted = [row[:max_tokens] for row in rows if any(b for _, b in row[:max_tokens])]
    folder = tmp_path_factory.mktemp("p")
    if not wanted:
        with pytest.raises(NoPromptsError):
            _prepare(folder, source, max_tokens=max_tokens)
        return
    found = _prepare(folder, source, max_tokens=max_tokens)
    assert [list(zip(_ids(prompt), _mask(prompt), strict=True)) for prompt in found.prompts] == wanted


def test_limit_counts_prompts_and_reads_no_further(tmp_path: Path):
    rows = [{"input_ids": []}, {"input_ids": [1]}, {"input_ids": [2]}, {"broken": True}]
    found = _prepare(tmp_path, rows, limit=2)
    assert [_ids(prompt) for prompt in found.prompts] == [[1], [2]]
    assert len(found.skipped) == 1


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"limit": 0}, {"max_tokens": 4096}])
def test_options_that_can_not_be_meant_are_refused(tmp_path: Path, options: dict[str, int]):
    with pytest.raises(UsageError, match="--"):
        _prepare(tmp_path, [{"input_ids": [1]}], **options)
    assert _prepare(tmp_path, [{"input_ids": [1]}], max_tokens=4095).prompts


def test_nothing_left_is_an_error_with_counts_by_reason(tmp_path: Path):
    rows = [{"input_ids": []}, {"input_ids": [1], "loss_mask": [0]}, {"input_ids": [2], "loss_mask": [0]}]
    with pytest.raises(NoPromptsError) as caught:
        _prepare(tmp_path, rows)
    assert caught.value.skipped == {"no trainable token": 2, "empty": 1}
    assert "none of the 3 rows" in str(caught.value)
    assert "row 2: the loss mask is 0 for all of 1 token" in str(caught.value)
    assert caught.value.exit_code == 1


def test_one_row_that_is_no_use_is_no_plural(tmp_path: Path):
    with pytest.raises(NoPromptsError, match=r"^the only row of .* can't be used \(empty: 1\)"):
        _prepare(tmp_path, [{"input_ids": []}])


def test_an_empty_file_is_an_error(tmp_path: Path):
    with pytest.raises(NoPromptsError, match="holds no rows"):
        _prepare(tmp_path, [])


def test_a_malformed_row_stops_everything_by_file_and_line(tmp_path: Path):
    with pytest.raises(RowError) as caught:
        _prepare(tmp_path, [{"input_ids": [1]}, {"input_ids": [1, 2], "loss_mask": [1]}])
    assert caught.value.where == f"{tmp_path / 'p.jsonl'}:2"


def test_a_template_without_stable_prefixes_stops_everything_and_all_goes(tmp_path: Path):
    folder = save_model_folder(tmp_path / "model", fast_tokenizer(kinds.UNSTABLE))
    model = read_model_facts(str(folder))
    rows = [{"messages": chat("user: first", "assistant: second")}]
    with pytest.raises(ChatTemplateError, match=str(folder)):
        _prepare(tmp_path, rows, model)
    assert _prepare(tmp_path, rows, model, loss_mask=LossMaskMode.ALL).facts.loss_mask == "all"


def test_warnings_carry_their_row_numbers(tmp_path: Path, chat_model: ModelFacts):
    plain = {"messages": chat("user: first", "assistant: second")}
    odd = {"messages": chat("user: first", "assistant: because</think>second")}
    found = _prepare(tmp_path, [plain, odd, plain, *[odd] * 5], chat_model)
    assert found.warnings == {f"{WarningKind.UNBALANCED_THINK.value} (rows 2, 4, 5, 6, 7, ...)": 6}
    assert found.noticed[0].first_rows == (2, 4, 5, 6, 7)


def test_a_mixture_of_given_and_made_masks_is_named(tmp_path: Path, chat_model: ModelFacts):
    rows = [{"input_ids": [1], "loss_mask": [1]}, {"messages": chat("user: first", "assistant: second")}]
    assert _prepare(tmp_path, rows, chat_model, loss_mask=LossMaskMode.LAST).facts.loss_mask == "given+last"


def test_another_tokenizer_than_the_models_can_be_named(tmp_path: Path):
    folder = save_model_folder(tmp_path / "tokenizer", fast_tokenizer(kinds.LLAMA))
    rows = [{"messages": chat("user: first", "assistant: second")}]
    found = _prepare(tmp_path, rows, tokenizer=str(folder))
    assert fast_tokenizer().decode(_ids(found.prompts[0])).endswith("second<|eot|>")


def test_the_fingerprint_is_that_of_keys_ids_tokens_and_masks_in_order(tmp_path: Path):
    found = _prepare(tmp_path, [{"id": "A", "input_ids": [1, 2], "loss_mask": [0, 1]}])
    expected = xxhash.xxh3_128()
    for part in (make_key("A").encode(), b"A", b"\1\0\0\0\2\0\0\0", b"\0\1"):
        expected.update(len(part).to_bytes(8, "little") + part)
    assert found.facts.fingerprint == expected.hexdigest()


def test_the_fingerprint_changes_with_anything_that_matters_and_nothing_else(tmp_path: Path):
    rows = [{"id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]}, {"id": "b", "input_ids": [3], "loss_mask": [1]}]
    base = _prepare(tmp_path, rows).facts.fingerprint
    changed: list[list[dict[str, Any]]] = [
        rows[::-1],
        rows[:1],
        [{**rows[0], "id": "c"}, rows[1]],
        [{**rows[0], "input_ids": [1, 3]}, rows[1]],
        [{**rows[0], "loss_mask": [1, 1]}, rows[1]],
    ]
    assert len({base, *(_prepare(tmp_path, other).facts.fingerprint for other in changed)}) == 6
    same = [*rows, {"id": "x", "input_ids": []}]
    assert (
        prepare_prompts(_source(tmp_path, same, "q.jsonl"), MODEL, PromptOptions(), Silent()).facts.fingerprint == base
    )
