"""Where in a rendered conversation each turn of the assistant stands, by rendering its prefixes.

    render(messages[:i], as a prompt)   must begin the whole text: the turn starts where it ends
    render(messages[:i+1])              must begin the whole text: the turn ends where it ends

Both are checked. Three departures are allowed, each proved on the text itself: the think tag that ends a generation
prompt may be absent from the whole text; the turn's own thought may be absent or blanked there; and reasoning that
changes nothing in the whole text is left out of the prefixes too. Anything else means that the places can't be known.
"""

from __future__ import annotations

from dataclasses import dataclass

from .chat import Chat, ChatTemplateError
from .loss_mask import Span
from .row_content import Conversation
from .think import OPEN, reasoning_of, split_think_tail, without_leading_thought, without_reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the assistant in characters of the rendered conversation."""

    index: int
    """Of the message."""

    span: Span
    """What the model wrote: from the end of the generation prompt through the token that ends the turn."""

    outer: Span
    """The same with the think tag that the generation prompt ends with, and blanks behind the end token."""

    is_changed: bool
    """The thought is rendered otherwise here than when the turn was the last one."""


class _UnstableError(Exception):
    def __init__(self, index: int, part: str) -> None:
        self.index = index
        self.part = part
        super().__init__(index, part)


def find_turns(chat: Chat, conversation: Conversation, text: str, indices: tuple[int, ...]) -> list[Turn]:
    """Return the turns of the messages at `indices`; `text` is the whole conversation's rendering.

    Raises:
        ChatTemplateError: a prefix's rendering is not a prefix of the whole's; it names the template and the turn.
        RowSkippedError: the template refuses a prefix.
    """
    try:
        return [_find_turn(chat, conversation, text, index) for index in indices]
    except _UnstableError as fault:
        bare = _without_dropped_reasoning(chat, conversation, text)
        if bare is conversation:
            raise _unstable_template(chat, fault) from None
    try:
        return [_find_turn(chat, bare, text, index) for index in indices]
    except _UnstableError as fault:
        raise _unstable_template(chat, fault) from None


def _find_turn(chat: Chat, conversation: Conversation, text: str, index: int) -> Turn:
    outer_start, start = _start(chat, conversation, text, index)
    turn, is_changed = _turn_text(chat, conversation, text, index, start)
    written = turn.rstrip()
    # ChatML puts a line break behind <|im_end|>, which no server ever writes: it stops at the token
    end = start + len(written if written.endswith(chat.end_marks) else turn)
    return Turn(index=index, span=(start, end), outer=(outer_start, start + len(turn)), is_changed=is_changed)


def _start(chat: Chat, conversation: Conversation, text: str, index: int) -> tuple[int, int]:
    """Return where the turn starts without and with the think tags of its generation prompt."""
    if index == 0:
        place, header = _first_header(chat, conversation, text)
    else:
        place, header = 0, chat.render(conversation, until=index, is_prompt=True)
    bare, tail = split_think_tail(header)
    outer_start = place + len(bare)
    if not text.startswith(bare, place):
        raise _UnstableError(index, "what stands before it")
    if text.startswith(tail, outer_start):
        return outer_start, outer_start + len(tail)
    return outer_start, outer_start + (len(OPEN) if text.startswith(OPEN, outer_start) else 0)


def _first_header(chat: Chat, conversation: Conversation, text: str) -> tuple[int, str]:
    """Return place and text of the generation prompt of a chat that the assistant opens.

    No template renders an empty conversation, so the generation prompt is what it adds to the first message.
    """
    plain = chat.render(conversation, until=1)
    prompt = chat.render(conversation, until=1, is_prompt=True)
    header = prompt.removeprefix(plain)
    bare = split_think_tail(header)[0]
    if not bare or not prompt.startswith(plain) or bare not in text:
        raise _UnstableError(0, "what stands before it")
    return text.index(bare), header


def _turn_text(chat: Chat, conversation: Conversation, text: str, index: int, start: int) -> tuple[str, bool]:
    if index == len(conversation.messages) - 1:
        return text[start:], False
    until = chat.render(conversation, until=index + 1)
    if not until.startswith(text[:start]):
        raise _UnstableError(index, "what stands before it")
    turn = until[start:]
    if text.startswith(turn, start):
        return turn, False
    for form in without_leading_thought(turn):
        if form and text.startswith(form, start):
            return form, True
    raise _UnstableError(index, "the turn itself")


def _without_dropped_reasoning(chat: Chat, conversation: Conversation, text: str) -> Conversation:
    """Return the conversation without each reasoning whose absence leaves the whole text as it is."""
    for index in conversation.assistant_indices:
        if reasoning_of(conversation.messages[index]):
            bare = without_reasoning(conversation, {index})
            if chat.render(bare) == text:
                conversation = bare
    return conversation


def _unstable_template(chat: Chat, fault: _UnstableError) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template of {chat.name} gives no loss mask for message {fault.index} (the first is 0)",
        why=f"Rendered up to that message, {fault.part} differs from the rendering of the whole conversation",
        mend="Use --loss-mask last or all, a template with {% generation %} marks, or rows of input_ids and loss_mask",
    )
