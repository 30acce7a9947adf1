"""One conversation to tokens, loss mask and warnings."""

from __future__ import annotations

import numpy as np

from .chat import Chat, ChatTemplateError, EncodedChat
from .loss_mask import LossMaskMode, Mask, count_shared_tokens, mask_from_offsets, mask_from_pieces
from .row_content import Conversation, is_unicode
from .row_outcome import RowSkippedError, SkipReason, TokenRow, WarningKind
from .think import is_unbalanced, reasoning_of
from .turns import Turn, find_turns


def tokenize_conversation(chat: Chat, conversation: Conversation, mode: LossMaskMode) -> TokenRow:
    """Return the ids of the whole conversation, tokenised once, with the mask that `mode` asks for.

    Raises:
        RowSkippedError: no messages, no text, refused by the template, or nobody's turn to train on.
        ChatTemplateError: the template gives no mask (see extraction/turns.py).
    """
    if not conversation.messages:
        raise RowSkippedError(SkipReason.EMPTY, "no messages")
    _check_parts(conversation)
    indices = _wanted(conversation, mode)
    text = chat.render(conversation)
    if not is_unicode(text):
        raise RowSkippedError(SkipReason.NOT_TEXT, "the text is no valid Unicode (half a surrogate pair)")
    encoded = chat.encode(conversation, with_marks=mode is not LossMaskMode.ALL)
    warnings = set(_think_warnings(conversation, text))
    if mode is LossMaskMode.ALL:
        mask_T = np.ones(len(encoded.ids), np.uint8)
    elif encoded.marks is not None:
        mask_T, found = _marked_mask(chat, conversation, text, encoded, indices)
        warnings |= found
    else:
        mask_T, found = _turns_mask(chat, text, encoded, find_turns(chat, conversation, text, indices))
        warnings |= found
    return TokenRow(
        ids=np.asarray(encoded.ids, np.int64),
        mask=mask_T,
        mask_kind=mode.value,
        warnings=tuple(sorted(warnings)),
    )


def _wanted(conversation: Conversation, mode: LossMaskMode) -> tuple[int, ...]:
    indices = conversation.assistant_indices
    if mode is not LossMaskMode.ALL and not indices:
        raise RowSkippedError(SkipReason.NO_TRAINABLE, "no message of the assistant")
    return indices[-1:] if mode is LossMaskMode.LAST else indices


def _check_parts(conversation: Conversation) -> None:
    for index, message in enumerate(conversation.messages):
        for part in message["content"] if isinstance(message["content"], list) else []:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise RowSkippedError(SkipReason.NOT_TEXT, f"message {index} has a part of type {kind!r}")


def _turns_mask(chat: Chat, text: str, encoded: EncodedChat, turns: list[Turn]) -> tuple[Mask, set[WarningKind]]:
    spans = [turn.span for turn in turns]
    warnings = {WarningKind.DROPPED_REASONING} if any(turn.is_changed for turn in turns) else set()
    if encoded.offsets is None:
        mask_T = mask_from_pieces(text, spans, encoded.ids, chat.encode_piece)
        if mask_T is None:
            raise RowSkippedError(
                SkipReason.NO_BORDER,
                f"the tokenizer of {chat.name} gives no offsets, and its tokens cross a turn's border",
            )
        return mask_T, warnings
    if count_shared_tokens(spans, encoded.offsets):
        warnings.add(WarningKind.SHARED)
    return mask_from_offsets(spans, encoded.offsets), warnings


def _marked_mask(
    chat: Chat, conversation: Conversation, text: str, encoded: EncodedChat, indices: tuple[int, ...]
) -> tuple[Mask, set[WarningKind]]:
    """Return the template's own marks, held against the turns that prefixes show: nothing outside them is trained."""
    assert encoded.marks is not None
    assert encoded.offsets is not None
    is_all = indices == conversation.assistant_indices
    try:
        turns = find_turns(chat, conversation, text, indices)
    except (ChatTemplateError, RowSkippedError):
        if not is_all:
            raise  # marks say which tokens are the assistant's, not which turn they belong to
        return encoded.marks, {WarningKind.MARKS_UNCHECKED}
    turns_T, warnings = _turns_mask(chat, text, encoded, turns)
    outer_T = mask_from_offsets([turn.outer for turn in turns], encoded.offsets)
    if is_all and (encoded.marks > outer_T).any():
        warnings.add(WarningKind.MARKS_TRIMMED)
    if any(not encoded.marks[mask_from_offsets([turn.span], encoded.offsets) == 1].any() for turn in turns):
        warnings.add(WarningKind.UNMARKED_TURN)
    return encoded.marks & turns_T, warnings


def _think_warnings(conversation: Conversation, text: str) -> list[WarningKind]:
    answers = [conversation.messages[index] for index in conversation.assistant_indices]
    found = [WarningKind.UNBALANCED_THINK] if any(is_unbalanced(answer) for answer in answers) else []
    if any(reasoning_of(answer) not in text for answer in answers):
        found.append(WarningKind.DROPPED_REASONING)
    return found
