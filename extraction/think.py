"""Think tags: what a template does with an assistant's reasoning, and how to tell.

Reasoning stands in a message's `reasoning_content` (or `reasoning`, `thinking`) or in its content between think tags.
Templates treat it in three ways that matter here. The generation prompt may end with the opening tag, so that the
model's own answer lacks it. Earlier turns may be rendered with their reasoning blanked or removed. And an answer
stored with the closing tag alone gets a second opening one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .row_content import Conversation, Message

OPEN, CLOSE = "<think>", "</think>"

_TAG = re.compile(r"</?think>")
_BLOCK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_PROMPT_TAIL = re.compile(r"<think>\s*(</think>\s*)?\Z")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def split_think_tail(prompt: str) -> tuple[str, str]:
    """Return a generation prompt without the think tags that end it, and those tags with their blanks."""
    match = _PROMPT_TAIL.search(prompt)
    return (prompt, "") if match is None else (prompt[: match.start()], match[0])


def without_leading_thought(turn: str) -> Iterator[str]:
    """Yield the forms that a template may give a turn once it is no longer the last one.

    `turn` is the rendering behind the generation prompt, which may have held the opening tag: the thought removed
    whole, or blanked with its tags kept.
    """
    head, close, answer = turn.partition(CLOSE)
    if not close:
        return
    opened = OPEN if head.lstrip().startswith(OPEN) else ""
    yield opened + close + answer
    yield answer.lstrip()


def is_unbalanced(message: Message) -> bool:
    """Tell whether the message's own text opens a thought that it does not close, or the other way round."""
    expected = OPEN
    for tag in _TAG.findall(content_text(message)):
        if tag != expected:
            return True
        expected = CLOSE if tag == OPEN else OPEN
    return expected == CLOSE


def reasoning_of(message: Message) -> str:
    """Return the reasoning that a message carries, in a field or between think tags, without blanks round it."""
    for field in _REASONING_FIELDS:
        value = message.get(field)
        if isinstance(value, str) and value.strip():
            return value.strip()
    match = _BLOCK.search(content_text(message))
    return "" if match is None else match[0].strip().removeprefix(OPEN).removesuffix(CLOSE).strip()


def without_reasoning(conversation: Conversation, indices: set[int]) -> Conversation:
    """Return the conversation with the reasoning of the messages at `indices` taken out."""
    messages = tuple(
        _bare(message) if index in indices else message for index, message in enumerate(conversation.messages)
    )
    return Conversation(messages=messages, tools=conversation.tools, template_options=conversation.template_options)


def content_text(message: Message) -> str:
    """Return the text of a message's content, its parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""


def _bare(message: Message) -> Message:
    bare = {key: value for key, value in message.items() if key not in _REASONING_FIELDS}
    if isinstance(bare.get("content"), str):
        bare["content"] = _BLOCK.sub("", bare["content"])
    return bare
