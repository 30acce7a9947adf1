"""A row's content to tokens, with one tokenizer that is loaded for the first row that needs it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .chat import Chat, encode_text
from .chat_tokens import tokenize_conversation
from .loss_mask import LossMaskMode
from .row_content import Content, Conversation, PlainText, TokenIds
from .row_outcome import RowSkippedError, SkipReason, TokenRow, WarningKind
from .tokenizer import Tokenizer, load_tokenizer, template_hash, tokenizer_hash

MASK_GIVEN = "given"
"""The kind of a mask that came with its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerChoice:
    """Which tokenizer to use, and whether its repository's code may run."""

    name: str
    revision: str | None
    trust_remote_code: bool


class RowTokenizer:
    """Makes tokens of content, and remembers what it needed for that."""

    def __init__(self, choice: TokenizerChoice, mode: LossMaskMode) -> None:
        """Nothing is loaded yet."""
        self._choice = choice
        self._mode = mode
        self.tokenizer_hash = ""
        """Empty until a row needs the tokenizer."""

        self.template_hash = ""
        """Empty until a row needs the chat template."""

    def tokens(self, content: Content) -> TokenRow:
        """Return the content's ids and mask.

        Raises:
            RowSkippedError: this row can't be used.
            ChatTemplateError, UsageError, StorageError: no row can.
        """
        if isinstance(content, TokenIds):
            return self._given(content)
        if isinstance(content, Conversation):
            return tokenize_conversation(self._chat, content, self._mode)
        return self._plain(content)

    def _given(self, content: TokenIds) -> TokenRow:
        if content.mask is not None:
            return TokenRow(ids=content.ids, mask=content.mask, mask_kind=MASK_GIVEN)
        return self._without_turns(content.ids)

    def _plain(self, content: PlainText) -> TokenRow:
        if not content.text:
            raise RowSkippedError(SkipReason.EMPTY, "the text is empty")
        ids = encode_text(self._tokenizer, content.text, self._choice.name)
        return self._without_turns(np.asarray(ids, np.int64))

    def _without_turns(self, ids_T: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> TokenRow:
        warnings = () if self._mode is LossMaskMode.ALL else (WarningKind.NO_TURNS,)
        mask_T = np.ones(len(ids_T), np.uint8)
        return TokenRow(ids=ids_T, mask=mask_T, mask_kind=LossMaskMode.ALL.value, warnings=warnings)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        choice = self._choice
        tokenizer = load_tokenizer(choice.name, revision=choice.revision, trust_remote_code=choice.trust_remote_code)
        self.tokenizer_hash = tokenizer_hash(tokenizer)
        return tokenizer

    @cached_property
    def _chat(self) -> Chat:
        chat = Chat(self._tokenizer, self._choice.name)
        self.template_hash = template_hash(self._tokenizer)
        return chat
