"""The assistant's turns in a rendered conversation: think tags, dropped reasoning, templates that change the past."""

from __future__ import annotations

from typing import Any

import pytest
from eaglehs.extraction.chat import Chat, ChatTemplateError
from eaglehs.extraction.chat_tokens import tokenize_conversation
from eaglehs.extraction.loss_mask import LossMaskMode
from eaglehs.extraction.row_content import Conversation
from eaglehs.extraction.row_outcome import WarningKind
from eaglehs.extraction.turns import find_turns

from tests.factories import tokenizers as kinds
from tests.factories.tokenizers import chat, fast_tokenizer


def _written(template: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    chatter = Chat(fast_tokenizer(template), "test")
    conversation = Conversation(messages=tuple(messages), template_options=options)
    text = chatter.render(conversation)
    turns = find_turns(chatter, conversation, text, conversation.assistant_indices)
    return [text[slice(*turn.span)] for turn in turns]


def _warnings(template: str, messages: list[dict[str, Any]]) -> tuple[WarningKind, ...]:
    chatter = Chat(fast_tokenizer(template), "test")
    return tokenize_conversation(chatter, Conversation(messages=tuple(messages)), LossMaskMode.ASSISTANT).warnings


def _call(content: str, thought: str) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "search", "arguments": {}}}]
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": calls}


def test_the_think_tag_of_the_generation_prompt_is_not_trained():
    assert _written(kinds.KIMI_THINK, chat("user: first", "assistant: second")) == ["</think>second<|im_end|>"]


def test_with_thinking_off_neither_tag_is_trained():
    messages = chat("user: first", "assistant: second")
    assert _written(kinds.KIMI_THINK, messages, thinking=False) == ["second<|im_end|>"]


def test_reasoning_that_the_template_blanks_is_told():
    messages = chat("user: first", "assistant: second", reasoning_content="because")
    assert _written(kinds.KIMI_THINK, messages) == ["</think>second<|im_end|>"]
    assert _warnings(kinds.KIMI_THINK, messages) == (WarningKind.DROPPED_REASONING,)


def test_reasoning_that_the_template_keeps_is_trained_without_a_warning():
    messages = [*chat("user: first"), _call("second", "because"), *chat("tool: third")]
    assert _written(kinds.KIMI_THINK, messages) == ["because</think>second[call search]<|im_end|>"]
    assert _warnings(kinds.KIMI_THINK, messages) == ()


def test_reasoning_of_tool_calls_that_a_later_answer_blanks_leaves_the_turns_known():
    # rendered alone the calls show their thoughts, in the whole they do not: plain prefixes are none here
    messages = [
        *chat("user: first"),
        _call("second", "because"),
        *chat("tool: third"),
        _call("fourth", "therefore"),
        *chat("tool: fifth", "assistant: sixth"),
    ]
    assert _written(kinds.KIMI_THINK, messages) == [
        "</think>second[call search]<|im_end|>",
        "</think>fourth[call search]<|im_end|>",
        "</think>sixth<|im_end|>",
    ]
    assert _warnings(kinds.KIMI_THINK, messages) == (WarningKind.DROPPED_REASONING,)


@pytest.mark.parametrize("thought", ["", "because"])
def test_a_template_that_shows_thoughts_in_the_last_turn_only_leaves_the_turns_known(thought: str):
    messages = chat("user: first", "assistant: second", reasoning_content=thought)
    messages += chat("user: third", "assistant: fourth", reasoning_content="therefore")
    assert _written(kinds.CHATML_THINK, messages) == [
        "second<|im_end|>",
        "therefore\n</think>\n\nfourth<|im_end|>",
    ]
    assert WarningKind.DROPPED_REASONING in _warnings(kinds.CHATML_THINK, messages)


def test_a_thought_in_the_text_of_an_answer_counts_as_reasoning():
    strip = kinds.KIMI.replace("{{ m.content }}<|im_end|>", "{{ m.content.split('</think>')[-1] }}<|im_end|>", 1)
    messages = chat("user: first", "assistant: <think>because</think>second", "user: third", "assistant: fourth")
    assert _written(strip, messages) == ["second<|im_end|>", "fourth<|im_end|>"]
    assert _warnings(strip, messages) == (WarningKind.DROPPED_REASONING,)


@pytest.mark.parametrize(
    "answer", ["because</think>second", "<think>because", "<think><think></think>", "</think><think>", "</think>"]
)
def test_unbalanced_think_tags_are_told(answer: str):
    assert WarningKind.UNBALANCED_THINK in _warnings(kinds.KIMI, chat("user: first", f"assistant: {answer}"))


@pytest.mark.parametrize("answer", ["second", "<think>because</think>second", "<think></think>a<think>b</think>"])
def test_balanced_think_tags_are_not(answer: str):
    assert _warnings(kinds.KIMI, chat("user: first", f"assistant: {answer}")) == ()


def test_the_line_break_behind_the_end_token_is_not_trained():
    messages = chat("user: first", "assistant: second", "user: third", "assistant: fourth")
    assert _written(kinds.CHATML, messages) == ["second<|im_end|>", "fourth<|im_end|>"]


def test_blanks_that_end_an_answer_without_an_end_token_stay():
    bare = "{%- for m in messages -%}{{ m.role + ':' + m.content }}{%- endfor -%}"
    bare += "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
    messages = [{"role": "user", "content": "a\n"}, {"role": "assistant", "content": "b \n"}]
    assert _written(bare, messages) == ["b \n"]


@pytest.mark.parametrize(
    "template", [kinds.UNSTABLE, kinds.UNSTABLE.replace("{{ messages | length }}", "{{ messages }}")]
)
@pytest.mark.parametrize("first", ["user", "assistant"])
def test_a_template_whose_prefix_is_none_is_refused_by_message(template: str, first: str):
    messages = chat(f"{first}: first", "assistant: second", "user: third", "assistant: fourth")
    with pytest.raises(ChatTemplateError, match=r"no loss mask for message [01] "):
        _written(template, messages)


def test_a_turn_that_loses_its_first_word_later_is_no_dropped_thought():
    cut = kinds.KIMI.replace(
        "{{ m.content }}<|im_end|>", "{{ m.content if loop.last else m.content[1:] }}<|im_end|>", 1
    )
    with pytest.raises(ChatTemplateError, match="the turn itself differs"):
        _written(cut, chat("user: first", "assistant: second", "user: third", "assistant: fourth"))
