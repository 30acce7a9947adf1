"""Rows of every known form to typed content."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eaglehs.extraction.prompt_rows import RowError
from eaglehs.extraction.row_content import Conversation, PlainText, TokenIds, row_content, row_id


def _conversation(row: dict[str, Any]) -> Conversation:
    content = row_content(row, "p:1")
    assert isinstance(content, Conversation)
    return content


def _ids(row: dict[str, Any]) -> TokenIds:
    content = row_content(row, "p:1")
    assert isinstance(content, TokenIds)
    return content


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a"}, "a"),
        ({"id": 7}, "7"),
        ({"conversation_id": "c", "uuid": "u"}, "c"),
        ({"id": None, "uuid": "u"}, "u"),
        ({}, "00000012"),
    ],
)
def test_the_id_is_the_rows_own_or_its_number(row: dict[str, Any], expected: str):
    assert row_id(row, 12, "p:12") == expected


@pytest.mark.parametrize("value", ["", 1.5, True, ["a"], "\ud83d"])
def test_an_id_that_is_none_is_refused_with_its_place(value: Any):
    with pytest.raises(RowError, match=r"^p:12: id is "):
        row_id({"id": value}, 12, "p:12")


def test_messages_keep_all_that_a_template_may_want_and_lose_what_arrow_added():
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}]
    message = {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": calls, "name": None}
    found = _conversation({"messages": [{"role": "user", "content": "q"}, message]}).messages
    assert found[0] == {"role": "user", "content": "q"}
    expected = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert found[1] == {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": expected}


@pytest.mark.parametrize(
    ("speaker", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("GPT", "assistant"),
        ("assistant", "assistant"),
        ("bing", "assistant"),
        ("system", "system"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("function_response", "tool"),
    ],
)
def test_sharegpt_speakers_become_roles(speaker: str, role: str):
    found = _conversation({"conversations": [{"from": speaker, "value": "v", "weight": None}]})
    assert found.messages == ({"role": role, "content": "v"},)


def test_an_object_of_lists_is_a_list_of_objects():
    found = _conversation({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}})
    assert [message["role"] for message in found.messages] == ["user", "assistant"]
    with pytest.raises(RowError, match="conversations is a dict, no list"):
        row_content({"conversations": {"from": ["human", "gpt"], "value": ["q"]}}, "p:1")


def test_conversations_with_roles_are_messages_and_a_system_column_comes_first():
    row = {"conversations": [{"role": "user", "content": "q"}], "system": "s"}
    assert [message["role"] for message in _conversation(row).messages] == ["system", "user"]
    row["conversations"].insert(0, {"from": "system", "value": "own"})
    assert [message["content"] for message in _conversation(row).messages] == ["own", "q"]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]', [{"name": "f", "x": None}]])
def test_tools_come_as_a_list_or_as_json_text(tools: Any):
    assert _conversation({"messages": [], "tools": tools}).tools == ({"name": "f"},)


def test_template_options_are_handed_on_but_not_those_that_change_the_call():
    row = {"messages": [], "chat_template_kwargs": {"thinking": False, "unset": None}}
    assert _conversation(row).template_options == {"thinking": False}
    row["chat_template_kwargs"] = {"chat_template": "mine"}
    with pytest.raises(RowError, match="sets chat_template, which is not the row's to set"):
        row_content(row, "p:1")


def test_ids_come_first_and_are_never_made_again():
    found = _ids({"input_ids": [1, 2, 3], "loss_mask": [0, True, 1], "messages": [], "text": "other"})
    assert found.ids.tolist() == [1, 2, 3]
    assert found.mask is not None
    assert found.mask.tolist() == [0, 1, 1]
    assert found.mask.dtype == np.uint8


def test_ids_without_mask_and_without_tokens_are_left_to_the_checks():
    assert _ids({"input_ids": [5]}).mask is None
    assert _ids({"input_ids": []}).ids.shape == (0,)


def test_ids_too_big_for_int32_keep_their_value():
    assert _ids({"input_ids": [2**40]}).ids.tolist() == [2**40]


@pytest.mark.parametrize("ids", ["1 2", [1.0], ["1"], [[1, 2]], [[1], [2, 3]], [2**70], [2**63], [None], 5])
def test_ids_that_are_no_flat_list_of_whole_numbers_are_refused(ids: Any):
    with pytest.raises(RowError, match=r"^p:1: input_ids(\[0\])? is "):
        row_content({"input_ids": ids}, "p:1")


def test_a_mask_of_another_length_is_refused_with_both_lengths():
    with pytest.raises(RowError, match="loss_mask has 70 values for 64 input_ids"):
        row_content({"input_ids": [1] * 64, "loss_mask": [1] * 70}, "p:1")


def test_a_mask_value_other_than_0_and_1_is_named_with_its_place():
    with pytest.raises(RowError, match=r"loss_mask\[2\] is -100, neither 0 nor 1"):
        row_content({"input_ids": [1, 2, 3], "loss_mask": [0, 1, -100]}, "p:1")


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**70)])
def test_a_number_that_is_too_large_is_told_by_its_place(number: int):
    with pytest.raises(RowError, match=rf"p:1: input_ids\[1\] is a number of {number.bit_length()} bits"):
        row_content({"input_ids": [1, number]}, "p:1")


def test_text_is_text():
    assert row_content({"text": "a"}, "p:1") == PlainText(text="a")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "answer": "b"}, r"none of input_ids, messages, .* \(answer, prompt\)"),
        ({"messages": None, "n": 1}, r"none of input_ids, messages, .* \(messages: null, n\)"),
        ({}, r"\(none\)"),
        ({"text": 5}, "text is an int"),
        ({"messages": "hello"}, "messages is a str, no list"),
        ({"messages": ["hello"]}, r"messages\[0\] is a str, no object"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is an int"),
        ({"conversations": [{"from": "martian", "value": "v"}]}, "from is 'martian'; known are"),
        ({"conversations": [{"from": ["gpt"], "value": "v"}]}, "from is "),
        ({"conversations": [{"from": "gpt", "value": 5}]}, "value is an int"),
        ({"messages": [], "tools": "{"}, "tools is text but no JSON"),
        ({"messages": [], "tools": {"a": 1}}, "tools is no list of objects"),
        ({"messages": [], "chat_template_kwargs": "thinking"}, "chat_template_kwargs is a str"),
    ],
)
def test_a_row_of_another_form_is_named_with_its_fault(row: dict[str, Any], fault: str):
    with pytest.raises(RowError, match=rf"^p:1: .*{fault}"):
        row_content(row, "p:1")
