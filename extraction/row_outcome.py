"""What can become of a row: tokens, or a reason why it is left out; and what is worth a warning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ..schemas.errors import DataError


class SkipReason(StrEnum):
    """Why a row is left out; the words of run.json and the card."""

    EMPTY = "empty"
    NO_TRAINABLE = "no trainable token"
    OUTSIDE_VOCABULARY = "token outside the vocabulary"
    DUPLICATE_ID = "duplicate id"
    DUPLICATE_KEY = "duplicate key"
    LONGER_THAN_CONTEXT = "longer than the context"
    LONGER_THAN_MEMBER = "too long for one shard member"
    TEMPLATE_REFUSED = "refused by the chat template"
    NOT_TEXT = "not text"
    NO_BORDER = "a token spans the border of a turn"


class WarningKind(StrEnum):
    """What is kept but may not be what the user expects; the value is the message."""

    UNBALANCED_THINK = "an answer has unbalanced think tags"
    DROPPED_REASONING = "the chat template drops the reasoning of a turn"
    NO_TURNS = "plain text or ids without loss_mask have no turns: every token is trained"
    CUT = "cut to --max-tokens"
    SHARED = "a token holds characters of both the prompt and the answer; a server never sees it there"
    MARKS_TRIMMED = "the template's generation marks reach beyond the assistant's turns: cut back"
    MARKS_UNCHECKED = "the template renders prefixes otherwise than the whole: its generation marks are taken unchecked"
    UNMARKED_TURN = "a turn of the assistant has no generation marks and is not trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that is left out."""

    row: int
    """Counted from 1."""

    id: str
    reason: SkipReason
    detail: str
    """The values behind the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWarning:
    """How many rows share a warning, and the first of them."""

    kind: WarningKind
    num_rows: int
    first_rows: tuple[int, ...]

    @property
    def text(self) -> str:
        """The message with the first row numbers: `<what> (rows 4, 17, 20)`."""
        numbers = ", ".join(map(str, self.first_rows)) + (", ..." if self.num_rows > len(self.first_rows) else "")
        word = "row" if self.num_rows == 1 else "rows"
        return f"{self.kind.value} ({word} {numbers})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A row as tokens."""

    ids: NDArray[np.int64]
    """[T]; not yet held against a vocabulary."""

    mask: NDArray[np.uint8]
    """[T], 0 or 1."""

    mask_kind: str
    """`assistant`, `last`, `all`, or `given`."""

    warnings: tuple[WarningKind, ...] = ()


class RowSkippedError(DataError):
    """One row can't be used; the others go on."""

    def __init__(self, reason: SkipReason, detail: str) -> None:
        """Keep both for the record of skipped rows."""
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason.value}: {detail}")
