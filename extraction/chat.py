"""A tokenizer with its chat template: conversations to text, and to one flat list of ids. `T` = tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from .loss_mask import Mask, Span
from .row_content import Conversation, is_unicode
from .row_outcome import RowSkippedError, SkipReason
from .tokenizer import Tokenizer

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplateError(DataError):
    """A chat template, or what a tokenizer makes of it, can't be used for what is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChat:
    """One conversation as the model reads it."""

    ids: list[int]
    offsets: list[Span] | None
    """Each token's characters in the rendered text; None where the tokenizer does not tell."""

    marks: Mask | None
    """[T], 1 inside the template's `{% generation %}` marks; None where it has none or the tokenizer can't tell."""


class Chat:
    """Renders and encodes conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """`name` is what errors call the tokenizer.

        Raises:
            UsageError: the tokenizer has no chat template.
        """
        template = tokenizer.chat_template
        if not template:
            raise UsageError(
                f"the tokenizer of {name} has no chat template",
                why="A conversation can't be turned into tokens without one",
                mend="Put a chat_template.jinja beside its files, or give rows with text or input_ids",
            )
        self.name = name
        self._tokenizer = tokenizer
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        texts = template.values() if isinstance(template, Mapping) else [template]
        self.has_marks = self._has_offsets and any(_GENERATION.search(text) for text in texts)
        self.end_marks = _special_texts(tokenizer)

    def render(self, conversation: Conversation, *, until: int | None = None, is_prompt: bool = False) -> str:
        """Return the text of the first `until` messages; with `is_prompt` as a server renders it to be answered.

        Raises:
            RowSkippedError: the template refuses these messages.
            ChatTemplateError: the template itself is faulty.
        """
        return str(self._apply(conversation, until, is_prompt=is_prompt, tokenize=False))

    def encode(self, conversation: Conversation, *, with_marks: bool = True) -> EncodedChat:
        """Return the whole conversation's ids, made once; marks cost transformers as long as the ids do.

        Raises:
            RowSkippedError: the template refuses it.
            ChatTemplateError: what comes back is no list of ids.
        """
        with_marks = with_marks and self.has_marks
        asked: dict[str, Any] = {"tokenize": True, "return_dict": True}
        if self._has_offsets:
            asked["tokenizer_kwargs"] = {"return_offsets_mapping": True}
            asked["return_assistant_tokens_mask"] = with_marks
        output = self._apply(conversation, None, is_prompt=False, **asked)
        ids = flat_ids(output, self.name)
        offsets = _flat(output["offset_mapping"]) if self._has_offsets else None
        marks_T = np.asarray(_flat(output["assistant_masks"]), np.uint8) if with_marks else None
        for found in (offsets, marks_T):
            if found is not None and len(found) != len(ids):
                raise ChatTemplateError(
                    f"the tokenizer of {self.name} gave {counted(len(found), 'offset or mark', 'offsets or marks')} "
                    f"for {counted(len(ids), 'id')}"
                )
        return EncodedChat(ids=ids, offsets=offsets, marks=marks_T)

    def encode_piece(self, text: str) -> list[int]:
        """Return the ids of a piece of rendered text, without any token put before or behind."""
        return flat_ids(self._tokenizer(text, add_special_tokens=False), self.name)

    def _apply(self, conversation: Conversation, until: int | None, *, is_prompt: bool, **asked: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                list(conversation.messages[:until]),
                tools=list(conversation.tools) or None,
                add_generation_prompt=is_prompt,  # always given: Kimi's own class has another default
                **asked,
                **conversation.template_options,
            )
        except jinja2.TemplateSyntaxError as fault:
            raise ChatTemplateError(
                f"the chat template of {self.name} is faulty at line {fault.lineno}: {fault}"
            ) from None
        except (jinja2.TemplateError, TypeError, KeyError) as fault:
            # `raise_exception` of the template, or a message without a field that it takes for granted
            part = "the conversation" if until is None else f"its first {counted(until, 'message')} alone"
            raise RowSkippedError(
                SkipReason.TEMPLATE_REFUSED, f"the template refuses {part}: {str(fault)[:200]}"
            ) from None


def encode_text(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """Return the ids of plain text as a server makes them: with the tokenizer's own start token, but not twice.

    Raises:
        RowSkippedError: the text is no valid Unicode.
    """
    if not is_unicode(text):
        raise RowSkippedError(SkipReason.NOT_TEXT, "the text is no valid Unicode (half a surrogate pair)")
    start = getattr(tokenizer, "bos_token", None)
    has_start = bool(start) and text.startswith(str(start))
    return flat_ids(tokenizer(text, add_special_tokens=not has_start), name)


def flat_ids(output: Any, name: str = "the tokenizer") -> list[int]:
    """Return what a tokenizer gave for one text as one list of ints.

    Takes a list, [[ids]], an array or tensor of one or two dimensions, an `Encoding`, or a mapping with `input_ids`
    (transformers 5 returns a mapping where 4 gave a list; its length is 2, not the number of tokens).

    Raises:
        ChatTemplateError: anything else, or more than one sequence.
    """
    ids = _flat(output)
    array = np.asarray(ids) if isinstance(ids, list) and ids else np.zeros(0, np.int64)
    if not isinstance(ids, list) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ChatTemplateError(
            f"the tokenizer of {name} gave a {type(output).__name__} that is no single list of token ids",
            mend="This tokenizer class needs support in eaglehs; rows with input_ids work without it",
        )
    return [int(item) for item in ids]


def _flat(output: Any) -> Any:
    if isinstance(output, Mapping):
        output = output.get("input_ids")
    if hasattr(output, "tolist"):
        output = output.tolist()
    if hasattr(output, "ids"):
        output = output.ids
    if isinstance(output, tuple):
        output = list(output)
    is_batch = isinstance(output, list) and len(output) == 1 and isinstance(output[0], list)
    return output[0] if is_batch else output


def _special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {str(token) for token in added.values() if getattr(token, "special", False)}
    return tuple(sorted(marked | {str(token) for token in tokenizer.all_special_tokens}))
