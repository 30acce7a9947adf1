"""Conversations to ids and masks with real tokenizers, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from eaglehs.extraction.chat import Chat, ChatTemplateError, encode_text, flat_ids
from eaglehs.extraction.chat_tokens import tokenize_conversation
from eaglehs.extraction.loss_mask import LossMaskMode
from eaglehs.extraction.row_content import Conversation
from eaglehs.extraction.row_outcome import RowSkippedError, SkipReason, TokenRow, WarningKind
from eaglehs.schemas.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from tests.factories import tokenizers as kinds
from tests.factories.tokenizers import chat, fast_tokenizer, slow_tokenizer

THREE_TURNS = chat(
    "system: You are a helpful assistant.",
    "user: Hello there!",
    "assistant: I am fine",
    "user: And you?",
    "assistant: Paris.",
)


def _tokens(tokenizer: Any, messages: list[dict[str, Any]], mode: str = "assistant", **options: Any) -> TokenRow:
    conversation = Conversation(messages=tuple(messages), template_options=options)
    return tokenize_conversation(Chat(tokenizer, "test"), conversation, LossMaskMode(mode))


def _trained(tokenizer: Any, row: TokenRow) -> list[str]:
    """Return the trained stretches as text, a stretch an entry."""
    stretches, current = [], list[int]()
    for token, is_trained in zip([*row.ids.tolist(), -1], [*row.mask.tolist(), 0], strict=True):
        if is_trained:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current, skip_special_tokens=False))
            current = []
    return stretches


@pytest.mark.parametrize("template", [kinds.KIMI, kinds.KIMI_MARKED])
def test_a_kimi_chat_is_masked_token_by_token(template: str):
    tokenizer = fast_tokenizer(template)
    row = _tokens(tokenizer, THREE_TURNS)
    text = tokenizer.apply_chat_template(THREE_TURNS, tokenize=False)
    assert row.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    pairs = list(zip(tokenizer.convert_ids_to_tokens(row.ids.tolist()), row.mask.tolist(), strict=True))
    start = pairs.index(("I", 1))
    assert pairs[start - 1 : start + 5] == [
        ("<|im_middle|>", 0),
        ("I", 1),
        ("Ġam", 1),
        ("Ġfine", 1),
        ("<|im_end|>", 1),
        ("<|im_user|>", 0),
    ]
    assert pairs[-2:] == [(".", 1), ("<|im_end|>", 1)]
    assert _trained(tokenizer, row) == ["I am fine<|im_end|>", "Paris.<|im_end|>"]
    assert row.warnings == ()


@pytest.mark.parametrize("make", [fast_tokenizer, slow_tokenizer])
@pytest.mark.parametrize(
    ("template", "end"), [(kinds.KIMI, "<|im_end|>"), (kinds.CHATML, "<|im_end|>"), (kinds.LLAMA, "<|eot|>")]
)
def test_each_template_and_tokenizer_trains_the_answers_and_their_end_tokens(make: Any, template: str, end: str):
    tokenizer = make(template)
    row = _tokens(tokenizer, THREE_TURNS)
    assert _trained(tokenizer, row) == [f"I am fine{end}", f"Paris.{end}"]


@pytest.mark.parametrize("make", [fast_tokenizer, slow_tokenizer])
@pytest.mark.parametrize("template", [kinds.KIMI, kinds.KIMI_MARKED, kinds.CHATML_MARKED])
def test_last_trains_the_last_turn_only(make: Any, template: str):
    tokenizer = make(template)
    assert _trained(tokenizer, _tokens(tokenizer, THREE_TURNS, "last")) == ["Paris.<|im_end|>"]
    open_end = [*THREE_TURNS, {"role": "user", "content": "first"}]
    assert _trained(tokenizer, _tokens(tokenizer, open_end, "last")) == ["Paris.<|im_end|>"]


def test_all_trains_every_token_even_with_a_template_that_gives_no_turns():
    row = _tokens(fast_tokenizer(kinds.UNSTABLE), THREE_TURNS, "all")
    assert row.mask.all()
    assert row.mask_kind == "all"


@pytest.mark.parametrize("make", [fast_tokenizer, slow_tokenizer])
@pytest.mark.parametrize("template", [kinds.KIMI, kinds.KIMI_MARKED, kinds.CHATML, kinds.LLAMA])
def test_an_assistant_that_speaks_first_is_trained(make: Any, template: str):
    tokenizer = make(template)
    messages = chat("assistant: Hello there!", "user: I am fine", "assistant: Paris.")
    trained = [text.replace("<|eot|>", "<|im_end|>") for text in _trained(tokenizer, _tokens(tokenizer, messages))]
    assert trained == ["Hello there!<|im_end|>", "Paris.<|im_end|>"]


def test_an_answer_that_repeats_the_users_words_is_told_apart():
    tokenizer = fast_tokenizer(kinds.KIMI)
    messages = chat("user: Paris.", "assistant: Paris.", "user: Paris.", "assistant: Paris.")
    row = _tokens(tokenizer, messages)
    assert _trained(tokenizer, row) == ["Paris.<|im_end|>"] * 2
    assert not row.mask[: row.ids.tolist().index(tokenizer.convert_tokens_to_ids("<|im_assistant|>"))].any()


def test_two_answers_in_a_row_are_both_trained():
    tokenizer = fast_tokenizer(kinds.KIMI)
    messages = chat("user: first", "assistant: second", "assistant: third")
    assert _trained(tokenizer, _tokens(tokenizer, messages)) == ["second<|im_end|>", "third<|im_end|>"]


def test_a_prefix_that_is_none_names_the_template_and_the_message():
    with pytest.raises(ChatTemplateError, match=r"template of test .* message 2 .*--loss-mask last or all"):
        _tokens(fast_tokenizer(kinds.UNSTABLE), THREE_TURNS)


def test_marks_of_a_template_without_stable_prefixes_are_taken_with_a_warning():
    tokenizer = fast_tokenizer(kinds.UNSTABLE_MARKED)
    row = _tokens(tokenizer, THREE_TURNS)
    assert _trained(tokenizer, row) == ["I am fine<|im_end|>", "Paris.<|im_end|>"]
    assert row.warnings == (WarningKind.MARKS_UNCHECKED,)


def test_marks_that_reach_into_the_users_turn_are_cut_back_with_a_warning():
    wide = "{%- generation -%}" + kinds.KIMI + "{%- endgeneration -%}"
    tokenizer = fast_tokenizer(wide)
    row = _tokens(tokenizer, THREE_TURNS)
    assert _trained(tokenizer, row) == ["I am fine<|im_end|>", "Paris.<|im_end|>"]
    assert row.warnings == (WarningKind.MARKS_TRIMMED,)


def test_a_turn_that_the_template_leaves_unmarked_is_told():
    answer = "{{ m.content }}<|im_end|>"
    marked = "{% generation %}" + answer + "{% endgeneration %}"
    last_only = kinds.KIMI.replace(
        answer, "{%- if loop.last -%}" + marked + "{%- else -%}" + answer + "{%- endif -%}", 1
    )
    tokenizer = fast_tokenizer(last_only)
    row = _tokens(tokenizer, THREE_TURNS)
    assert _trained(tokenizer, row) == ["Paris.<|im_end|>"]
    assert row.warnings == (WarningKind.UNMARKED_TURN,)


def test_a_chat_without_an_answer_has_no_trainable_token():
    with pytest.raises(RowSkippedError) as caught:
        _tokens(fast_tokenizer(), chat("user: Hello there!"))
    assert caught.value.reason is SkipReason.NO_TRAINABLE
    assert _tokens(fast_tokenizer(), chat("user: Hello there!"), "all").mask.all()


def test_what_the_template_refuses_is_skipped_with_its_own_words():
    with pytest.raises(RowSkippedError, match="roles must alternate") as caught:
        _tokens(fast_tokenizer(kinds.STRICT), chat("user: first", "user: second", "assistant: third"))
    assert caught.value.reason is SkipReason.TEMPLATE_REFUSED


def test_a_faulty_template_is_an_error_for_all_rows():
    with pytest.raises(ChatTemplateError, match="line 1"):
        _tokens(fast_tokenizer("{% for m in %}"), THREE_TURNS)


def test_a_tokenizer_without_template_says_what_to_do():
    with pytest.raises(UsageError, match="no chat template"):
        Chat(fast_tokenizer(None), "test")


@pytest.mark.parametrize("content", [[{"type": "image", "url": "x"}], ["text"], [{"type": "text", "text": "a"}, {}]])
def test_parts_that_are_not_text_are_skipped(content: list[Any]):
    with pytest.raises(RowSkippedError) as caught:
        _tokens(fast_tokenizer(), [{"role": "user", "content": content}, *THREE_TURNS])
    assert caught.value.reason is SkipReason.NOT_TEXT


def test_half_a_surrogate_pair_is_skipped_and_not_a_crash():
    with pytest.raises(RowSkippedError) as caught:
        _tokens(fast_tokenizer(), chat("user: \ud83d", "assistant: fine"))
    assert caught.value.reason is SkipReason.NOT_TEXT
    with pytest.raises(RowSkippedError):
        encode_text(fast_tokenizer(), "\ud83d", "test")


# Its generation prompt ends with a colon, and both tokenizers have one token for two of them
COLON = (
    "{%- for m in messages -%}{{ m.role + ':' + m.content + '<|eot|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
)


def test_a_token_that_spans_prompt_and_answer_is_trained_and_told():
    tokenizer = fast_tokenizer(COLON)
    row = _tokens(tokenizer, chat("user: first", "assistant: :second"))
    assert row.warnings == (WarningKind.SHARED,)
    assert _trained(tokenizer, row) == ["::second<|eot|>"]


def test_without_offsets_a_token_across_the_border_is_skipped():
    with pytest.raises(RowSkippedError) as caught:
        _tokens(slow_tokenizer(COLON), chat("user: first", "assistant: :second"))
    assert caught.value.reason is SkipReason.NO_BORDER


def test_the_text_is_tokenised_once_where_offsets_are_given():
    tokenizer = fast_tokenizer(kinds.KIMI_MARKED)
    calls: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def apply_chat_template(self, *args: Any, tokenize: bool, **options: Any) -> Any:
            calls.append("tokens" if tokenize else "text")
            return tokenizer.apply_chat_template(*args, tokenize=tokenize, **options)

        def __call__(self, *args: Any, **options: Any) -> Any:
            calls.append("tokens")
            return tokenizer(*args, **options)

    _tokens(Counted(), THREE_TURNS)
    assert calls.count("tokens") == 1


IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "output",
    [
        IDS,
        tuple(IDS),
        [IDS],
        {"input_ids": IDS, "attention_mask": [1, 1, 1]},
        {"input_ids": [IDS], "attention_mask": [[1, 1, 1]]},
        BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]}),
        BatchEncoding({"input_ids": torch.tensor([IDS])}),
        torch.tensor(IDS),
        torch.tensor([IDS]),
        np.array(IDS),
        np.array([IDS], np.int32),
    ],
)
def test_whatever_a_tokenizer_returns_becomes_one_flat_list(output: Any):
    found = flat_ids(output)
    assert found == IDS
    assert all(type(item) is int for item in found)


def test_an_encoding_of_the_tokenizers_library_becomes_a_list_too():
    tokenizer = fast_tokenizer()
    assert flat_ids(tokenizer.backend_tokenizer.encode("Hello")) == tokenizer("Hello")["input_ids"]


@pytest.mark.parametrize("output", ["text", None, 5, [IDS, IDS], [[IDS]], ["5"], [1.5], {"tokens": IDS}, [True]])
def test_what_is_no_list_of_ids_is_refused(output: Any):
    with pytest.raises(ChatTemplateError, match="single list of token ids"):
        flat_ids(output)


@pytest.mark.parametrize("shape", ["mapping", "nested", "list"])
def test_a_python_tokenizer_gives_the_same_ids_in_whatever_shape(shape: str):
    tokenizer = slow_tokenizer()

    class Shaped:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            return tokenizer(*args, **options)

        def apply_chat_template(self, *args: Any, tokenize: bool, **options: Any) -> Any:
            output = tokenizer.apply_chat_template(*args, tokenize=tokenize, **options)
            if not tokenize:
                return output
            ids = output["input_ids"]
            return {"mapping": {"input_ids": ids, "attention_mask": [1] * len(ids)}, "nested": [ids], "list": ids}[
                shape
            ]

    expected, found = _tokens(tokenizer, THREE_TURNS), _tokens(Shaped(), THREE_TURNS)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.mask.tolist() == expected.mask.tolist()


def test_plain_text_gets_its_start_token_once():
    tokenizer = fast_tokenizer(bos=True)
    plain = encode_text(tokenizer, "Hello", "test")
    assert encode_text(tokenizer, "<|bos|>Hello", "test")[1:] == encode_text(fast_tokenizer(), "Hello", "test")
    assert plain[-1] == encode_text(fast_tokenizer(), "Hello", "test")[-1]


_WORDS = st.text(st.sampled_from(list("abc é日🙂\n .,Hello")), max_size=12)


@st.composite
def _conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(_WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["user", "assistant", "tool"]))
        messages.append({"role": role, "content": draw(_WORDS)})
    return [*messages, {"role": "assistant", "content": draw(_WORDS)}]


@settings(max_examples=60)
@given(messages=_conversations(), kind=st.sampled_from(["KIMI", "CHATML"]), mode=st.sampled_from(["assistant", "last"]))
def test_marks_and_prefixes_give_the_same_mask_with_and_without_offsets(
    messages: list[dict[str, Any]], kind: str, mode: str
):
    plain, marked = getattr(kinds, kind), getattr(kinds, f"{kind}_MARKED")
    by_prefix = _tokens(fast_tokenizer(plain), messages, mode)
    by_marks = _tokens(fast_tokenizer(marked), messages, mode)
    assert by_marks.ids.tolist() == by_prefix.ids.tolist()
    assert by_marks.mask.tolist() == by_prefix.mask.tolist()
    if mode == "assistant" and kind == "KIMI":
        raw = fast_tokenizer(marked).apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert by_prefix.mask.tolist() == raw["assistant_masks"]
