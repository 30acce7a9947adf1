"""Rows to typed content: a conversation, a text, or token ids, with the row's id.

A row is taken by the first of these fields that it has:

    input_ids       whole numbers, used as they are; `loss_mask` beside it: 0 or 1, of the same length
    messages        [{"role": "user", "content": "..."}, ...] as chat templates take them
    conversations   ShareGPT: [{"from": "human", "value": "..."}, ...]; a `system` column becomes the first message
    text            one string

A conversation may bring `tools` (a list, or JSON text) and `chat_template_kwargs` (such as {"thinking": false}), which
the template gets as a chat server would hand them on. The id is `id`, `conversation_id` or `uuid`, else the row number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schemas.counts import counted
from ..schemas.json_text import parse_json
from ..schemas.type_names import type_name
from .prompt_rows import Row, RowError

Message = dict[str, Any]
"""One message as a chat template takes it; what else than role and content it may hold is the template's business."""

_ID_FIELDS = ("id", "conversation_id", "uuid")
_ROW_ID_DIGITS = 8
_RESERVED_OPTIONS = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "tools"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs"),
        *("max_length", "padding", "truncation"),
    )
)
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and what a template needs beside them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)

    @property
    def assistant_indices(self) -> tuple[int, ...]:
        """The places of the assistant's messages."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """Text without turns."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Ids that the user made; never decoded, never made again."""

    ids: NDArray[np.int64]
    """[T]; int64, so that ids out of any vocabulary can be named instead of wrapping round."""

    mask: NDArray[np.uint8] | None
    """[T], 0 or 1; None where the row brings none."""


Content = Conversation | PlainText | TokenIds


def row_id(row: Row, number: int, where: str) -> str:
    """Return the row's own id as text, or its number in eight digits.

    Raises:
        RowError: the id is neither text nor a whole number, or is empty or no valid Unicode.
    """
    name = next((name for name in _ID_FIELDS if row.get(name) is not None), None)
    if name is None:
        return f"{number:0{_ROW_ID_DIGITS}d}"
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RowError(where, f"{name} is {value!r}, neither text nor a whole number")
    if not is_unicode(str(value)):
        raise RowError(where, f"{name} is {value!r}, which is no valid Unicode (half a surrogate pair)")
    return str(value)


def row_content(row: Row, where: str) -> Content:
    """Return what a row asks to run.

    Raises:
        RowError: no known field, or a value of another form than the module's docstring says.
    """
    if row.get("input_ids") is not None:
        return _token_ids(row, where)
    if row.get("messages") is not None:
        return _conversation(row, row["messages"], "messages", where)
    if row.get("conversations") is not None:
        return _conversation(row, row["conversations"], "conversations", where)
    if row.get("text") is not None:
        if not isinstance(row["text"], str):
            raise RowError(where, f"text is {type_name(row['text'])}, no string")
        return PlainText(text=row["text"])
    fields = ", ".join(f"{name}: null" if row[name] is None else str(name) for name in sorted(row, key=str)) or "none"
    raise RowError(
        where,
        f"none of input_ids, messages, conversations, text among its fields ({fields})",
        mend="Rename the field that holds the conversation",
    )


def is_unicode(text: str) -> bool:
    """Tell whether `text` can be encoded; JSON's escapes can hold half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_ids(row: Row, where: str) -> TokenIds:
    ids_T = _whole_numbers(row["input_ids"], "input_ids", where)
    if row.get("loss_mask") is None:
        return TokenIds(ids=ids_T, mask=None)
    mask_T = _whole_numbers(row["loss_mask"], "loss_mask", where)
    if len(mask_T) != len(ids_T):
        raise RowError(
            where,
            f"loss_mask has {counted(len(mask_T), 'value')} for {len(ids_T):,} input_ids",
            mend="Give one for each id",
        )
    odd = np.flatnonzero((mask_T != 0) & (mask_T != 1))
    if len(odd):
        raise RowError(where, f"loss_mask[{odd[0]}] is {mask_T[odd[0]]}, neither 0 nor 1")
    return TokenIds(ids=ids_T, mask=mask_T.astype(np.uint8))


def _whole_numbers(values: object, name: str, where: str) -> NDArray[np.int64]:
    if not isinstance(values, list | tuple | np.ndarray):
        raise RowError(where, f"{name} is {type_name(values)}, no list")
    if len(values) == 0:
        return np.zeros(0, np.int64)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.zeros(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iub" or (array.dtype.kind == "u" and array.dtype.itemsize == 8):
        for i, value in enumerate(values):
            if isinstance(value, int) and value.bit_length() > 63:
                raise RowError(where, f"{name}[{i}] is a number of {value.bit_length()} bits, too large for a token id")
        raise RowError(where, f"{name} is not a flat list of whole numbers", mend="Write it as [1, 2, 3]")
    return array.astype(np.int64)


def _conversation(row: Row, turns: object, name: str, where: str) -> Conversation:
    turns = _as_list(turns)
    if not isinstance(turns, list | tuple):
        raise RowError(where, f"{name} is {type_name(turns)}, no list")
    messages = [_message(turn, f"{name}[{i}]", where) for i, turn in enumerate(turns)]
    system = row.get("system")
    if isinstance(system, str) and system and name == "conversations" and (messages or [{}])[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    options = row.get("chat_template_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise RowError(where, f"chat_template_kwargs is {type_name(options)}, no object")
    reserved = sorted(_RESERVED_OPTIONS.intersection(options or ()))
    if reserved:
        raise RowError(where, f"chat_template_kwargs sets {reserved[0]}, which is not the row's to set")
    return Conversation(
        messages=tuple(messages),
        tools=_tools(row.get("tools"), where),
        template_options={key: value for key, value in (options or {}).items() if value is not None},
    )


def _as_list(turns: object) -> object:
    """Return a list of objects where `datasets` gave an object of lists, as it does for a `Sequence` of structs."""
    if not isinstance(turns, Mapping) or not all(isinstance(column, list) for column in turns.values()):
        return turns
    if len({len(column) for column in turns.values()}) != 1:
        return turns
    return [dict(zip(turns, values, strict=True)) for values in zip(*turns.values(), strict=True)]


def _message(turn: object, place: str, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise RowError(where, f"{place} is {type_name(turn)}, no object")
    if turn.get("role") is None and turn.get("from") is not None:
        return _sharegpt_message(turn, place, where)
    if not isinstance(turn.get("role"), str):
        raise RowError(where, f"{place} has no role", mend="Write it as {'role': 'user', 'content': '...'}")
    content = turn.get("content")
    if content is not None and not isinstance(content, str | list):
        raise RowError(where, f"{place}: content is {type_name(content)}, neither text nor a list of parts")
    return {"role": turn["role"], "content": content, **_without_none(turn, ("role", "content"))}


def _sharegpt_message(turn: Mapping[str, Any], place: str, where: str) -> Message:
    speaker, value = turn["from"], turn.get("value")
    role = _SHAREGPT_ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise RowError(where, f"{place}: from is {speaker!r}; known are {', '.join(sorted(_SHAREGPT_ROLES))}")
    if not isinstance(value, str):
        raise RowError(where, f"{place}: value is {type_name(value)}, no text")
    return {"role": role, "content": value, **_without_none(turn, ("from", "value", "role", "content"))}


def _without_none(turn: Mapping[str, Any], known: tuple[str, ...]) -> Message:
    """Return the other fields of a message that are set: Arrow gives each row every field that any row has."""
    return {key: _dense(value) for key, value in turn.items() if key not in known and value is not None}


def _dense(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return [_dense(item) for item in value] if isinstance(value, list | tuple) else value


def _tools(value: object, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except ValueError as fault:
            raise RowError(where, f"tools is text but no JSON ({fault})") from None
    if not value:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowError(where, "tools is no list of objects")
    return tuple(_dense(tool) for tool in value)
