"""Prompt sources to the prompts of a run: rows -> content -> tokens and mask -> checked -> Prompt.

What is kept can be run as it is: ids inside the model's vocabulary, short enough for its context and for one shard
member, at least one trained token, an id and a key of its own. The rest is left out with a count and a reason. A row
that is malformed stops everything, by file and line: it is the file that is wrong then.

One rule for rows: ids[t], mask[t] and the states of row t belong together, and the states of row t are made by feeding
ids[t]. Nothing is shifted; a trainer shifts. Every id is fed, so every id has a row, the last one too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from ..schemas.keys import make_key, shown_id
from ..schemas.progress import Progress
from ..schemas.prompt import Prompt
from ..schemas.run import ModelFacts, PromptFacts
from ..schemas.states import MAX_MEMBER_BYTES
from .loss_mask import LossMaskMode
from .prompt_rows import Row, read_rows
from .row_content import row_content, row_id
from .row_outcome import PromptWarning, RowSkippedError, SkippedRow, SkipReason, TokenRow, WarningKind
from .row_tokens import RowTokenizer, TokenizerChoice

__all__ = ["LossMaskMode", "NoPromptsError", "PreparedPrompts", "PromptOptions", "max_member_tokens", "prepare_prompts"]

_FIRST_ROWS = 5
_BF16_BYTES = 2


class NoPromptsError(DataError):
    """A source gave no prompt that can be run; `skipped` counts why."""

    def __init__(self, source: str, skipped: tuple[SkippedRow, ...]) -> None:
        """Tell the counts by reason, and the first row of the commonest one."""
        self.skipped = _counts(skipped)
        if not skipped:
            super().__init__(f"{source} holds no rows", mend="Give a file with one prompt a line")
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.skipped.items())
        commonest = next(iter(self.skipped))
        first = next(row for row in skipped if row.reason.value == commonest)
        super().__init__(
            _unusable(len(skipped), source) + f" ({reasons})",
            why=f"First of them, row {first.row}: {first.detail}",
        )


def _unusable(num_rows: int, source: str) -> str:
    if num_rows == 1:
        return f"the only row of {source} can't be used"
    return f"none of the {counted(num_rows, 'row')} of {source} can be used"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What the user may ask of prompts."""

    loss_mask: LossMaskMode = LossMaskMode.ASSISTANT
    max_tokens: int | None = None
    """Longer prompts are cut to this many tokens, mask and all; None: those longer than the context are left out."""

    limit: int | None = None
    """Stop after this many prompts; rows that are left out don't count."""

    tokenizer: str | None = None
    """Folder or Hub name; None: the model's own."""

    revision: str | None = None
    """Of the tokenizer on the Hub; None: for the model's own, the model's."""

    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompts:
    """All prompts of a run, and what was not made into one."""

    prompts: tuple[Prompt, ...]
    """`input_ids` are int32 arrays, `loss_mask` uint8 arrays, both [T]."""

    facts: PromptFacts
    skipped: tuple[SkippedRow, ...]
    noticed: tuple[PromptWarning, ...]
    """Warnings, by kind."""

    @property
    def warnings(self) -> dict[str, int]:
        """Message with the first row numbers -> number of rows."""
        return {warning.text: warning.num_rows for warning in self.noticed}


def prepare_prompts(source: str, model: ModelFacts, options: PromptOptions, progress: Progress) -> PreparedPrompts:
    """Return the prompts of `source` (see extraction/prompt_rows.py) for `model`, in the order of its rows.

    A tokenizer is loaded for the first row that needs one; rows of `input_ids` need none.

    Raises:
        UsageError: an option or source that can't be meant, or a tokenizer that can't be had.
        DataError: a malformed row (RowError), a template without a mask (ChatTemplateError), or nothing left.
        StorageError: a file, the Hub or its cache can't be read.
    """
    _check_options(options, model)
    tokenizer = RowTokenizer(_tokenizer_choice(options, model), options.loss_mask)
    table = _PromptTable(source, model, options)
    for number, row in read_rows(source):
        num_tokens = _add_row(table, tokenizer, number, row)
        progress.advance(num_samples=1, num_tokens=num_tokens)
        if len(table.prompts) == options.limit:
            break
    if not table.prompts:
        raise NoPromptsError(source, tuple(table.skipped))
    return table.finish(tokenizer)


def max_member_tokens(model: ModelFacts) -> int:
    """Return how many rows of one state fit one shard member (149,796 at width 7168)."""
    return MAX_MEMBER_BYTES // (_BF16_BYTES * model.hidden_size)


def _check_options(options: PromptOptions, model: ModelFacts) -> None:
    for flag, value in (("--max-tokens", options.max_tokens), ("--limit", options.limit)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} leaves nothing", mend="Give a number above zero")
    if options.max_tokens is not None and options.max_tokens > _context_tokens(model):
        raise UsageError(
            f"--max-tokens {options.max_tokens} is more than {model.name} can be given ({_context_tokens(model):,})",
            why=f"Its config.json allows {counted(model.max_position, 'position')}, and the engine is asked "
            "for one token more",
        )


def _context_tokens(model: ModelFacts) -> int:
    """Return the longest prompt: the engine is asked for one token behind it, which needs a position too."""
    return model.max_position - 1


def _tokenizer_choice(options: PromptOptions, model: ModelFacts) -> TokenizerChoice:
    name = options.tokenizer or model.name
    revision = options.revision or (model.hub_revision if name == model.name else None)
    return TokenizerChoice(name=name, revision=revision, trust_remote_code=options.trust_remote_code)


def _add_row(table: _PromptTable, tokenizer: RowTokenizer, number: int, row: Row) -> int:
    """Put one row where it belongs, and return the tokens that it adds."""
    where = f"{table.source}:{number}"
    found_id = row_id(row, number, where)
    try:
        return table.add(number, found_id, tokenizer.tokens(row_content(row, where)))
    except RowSkippedError as fault:
        table.skipped.append(SkippedRow(row=number, id=found_id, reason=fault.reason, detail=fault.detail))
        return 0


class _PromptTable:
    """The prompts so far, with what must not come twice."""

    def __init__(self, source: str, model: ModelFacts, options: PromptOptions) -> None:
        self.source = source
        self._name = _source_name(source)
        self.prompts: list[Prompt] = []
        self.skipped: list[SkippedRow] = []
        self._model = model
        self._options = options
        self._row_of_id: dict[str, int] = {}
        self._row_of_key: dict[str, int] = {}
        self._mask_kinds: set[str] = set()
        self._warned: dict[WarningKind, list[int]] = {}
        self._fingerprint = xxhash.xxh3_128()

    def add(self, number: int, found_id: str, tokens: TokenRow) -> int:
        """Check and keep one row; return its number of tokens.

        Raises:
            RowSkippedError: it can't be kept.
        """
        kept = _cut(tokens, self._options.max_tokens)
        _check_tokens(kept, self._model)
        key = make_key(found_id)
        for seen, name, reason in (
            (self._row_of_id, found_id, SkipReason.DUPLICATE_ID),
            (self._row_of_key, key, SkipReason.DUPLICATE_KEY),
        ):
            if name in seen:
                raise RowSkippedError(reason, f"'{shown_id(name)}' is row {seen[name]}'s already")
        self._row_of_id[found_id] = self._row_of_key[key] = number
        self._mask_kinds.add(kept.mask_kind)
        for kind in kept.warnings:
            self._warned.setdefault(kind, []).append(number)
        prompt = Prompt(
            key=key,
            id=found_id,
            source=f"{self._name}:{number}",
            input_ids=cast("Sequence[int]", kept.ids.astype(np.int32)),  # numpy declares no Sequence
            loss_mask=cast("Sequence[int]", kept.mask),
        )
        self.prompts.append(prompt)
        self._take_fingerprint(prompt)
        return prompt.num_tokens

    def finish(self, tokenizer: RowTokenizer) -> PreparedPrompts:
        """Return everything, with the facts for run.json."""
        facts = PromptFacts(
            source=self._name,
            fingerprint=self._fingerprint.hexdigest(),
            num_prompts=len(self.prompts),
            num_tokens=sum(prompt.num_tokens for prompt in self.prompts),
            num_trainable=sum(int(np.sum(prompt.loss_mask)) for prompt in self.prompts),
            skipped=_counts(tuple(self.skipped)),
            tokenizer_hash=tokenizer.tokenizer_hash,
            template_hash=tokenizer.template_hash,
            loss_mask="+".join(sorted(self._mask_kinds)),
            max_tokens=self._options.max_tokens,
        )
        return PreparedPrompts(
            prompts=tuple(self.prompts), facts=facts, skipped=tuple(self.skipped), noticed=tuple(self._noticed())
        )

    def _noticed(self) -> Iterator[PromptWarning]:
        for kind in sorted(self._warned):
            rows = self._warned[kind]
            yield PromptWarning(kind=kind, num_rows=len(rows), first_rows=tuple(rows[:_FIRST_ROWS]))

    def _take_fingerprint(self, prompt: Prompt) -> None:
        """Take in key, id, token ids and mask, each behind its length, so that no two prompt sets read the same."""
        parts = (
            prompt.key.encode(),
            prompt.id.encode(),
            np.asarray(prompt.input_ids, "<i4").tobytes(),
            np.asarray(prompt.loss_mask, np.uint8).tobytes(),
        )
        for part in parts:
            self._fingerprint.update(len(part).to_bytes(8, "little"))
            self._fingerprint.update(part)


def _source_name(source: str) -> str:
    """Return what a dataset may tell of its source: a file's or folder's name without the way to it."""
    if Path(source).expanduser().exists():
        return Path(source).expanduser().name
    folder, colon, split = source.partition(":")
    path = Path(folder).expanduser()
    return f"{path.name}{colon}{split}" if path.exists() else source


def _cut(tokens: TokenRow, max_tokens: int | None) -> TokenRow:
    if max_tokens is None or len(tokens.ids) <= max_tokens:
        return tokens
    return TokenRow(
        ids=tokens.ids[:max_tokens],
        mask=tokens.mask[:max_tokens],
        mask_kind=tokens.mask_kind,
        warnings=(*tokens.warnings, WarningKind.CUT),
    )


def _check_tokens(tokens: TokenRow, model: ModelFacts) -> None:
    """Refuse what the engine, the shards or a trainer can't take.

    The vocabulary is the config's: reserved slots count, and the tokenizer's own length may be another number. An id
    outside it kills SGLang's scheduler, and with it every other request.
    """
    num_tokens = len(tokens.ids)
    if not num_tokens:
        raise RowSkippedError(SkipReason.EMPTY, "no tokens")
    outside = np.flatnonzero((tokens.ids < 0) | (tokens.ids >= model.vocab_size))
    if len(outside):
        at = int(outside[0])
        detail = f"id {tokens.ids[at]} at position {at}; {model.name} has a vocabulary of {model.vocab_size}"
        raise RowSkippedError(SkipReason.OUTSIDE_VOCABULARY, detail)
    if num_tokens > max_member_tokens(model):
        most = counted(max_member_tokens(model), "row")
        detail = f"{counted(num_tokens, 'token')}; one member holds {most} of width {model.hidden_size}"
        raise RowSkippedError(SkipReason.LONGER_THAN_MEMBER, detail)
    if num_tokens > _context_tokens(model):
        detail = (
            f"{counted(num_tokens, 'token')}; {model.name} can be given {_context_tokens(model):,} (--max-tokens cuts)"
        )
        raise RowSkippedError(SkipReason.LONGER_THAN_CONTEXT, detail)
    if not tokens.mask.any():
        cut = "the first " if WarningKind.CUT in tokens.warnings else ""
        raise RowSkippedError(
            SkipReason.NO_TRAINABLE, f"the loss mask is 0 for all of {cut}{counted(num_tokens, 'token')}"
        )


def _counts(skipped: tuple[SkippedRow, ...]) -> dict[str, int]:
    """Return reason -> rows, the commonest first."""
    counts: dict[str, int] = {}
    for row in skipped:
        counts[row.reason.value] = counts.get(row.reason.value, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
