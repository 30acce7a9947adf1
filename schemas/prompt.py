"""Prompts as a run keeps them: `run/prompts.parquet`, written whole before the first request. Version 1.

The plan, the checks and the loss masks of `pack` come from this file alone, so a run needs neither its prompt files
nor its tokenizer again. Columns, a row a prompt, in the order in which samples are packed:

    key         string   see schemas/keys.py
    id          string   the user's own id, or the row number
    source      string   file or dataset the prompt came from, `name:row`
    input_ids   list<int32>
    loss_mask   list<uint8>   same length; 1 = a token that the drafter is trained on

The parquet's key-value metadata holds `eaglehs.kind` = `eaglehs.prompts` and `eaglehs.version` = `1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PROMPTS_KIND = "eaglehs.prompts"
PROMPTS_VERSION = 1
PROMPTS_FILENAME = "prompts.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One token list to run through the target model."""

    key: str
    id: str
    source: str
    input_ids: Sequence[int]
    """int32, T tokens; a list, tuple or 1-d numpy array."""

    loss_mask: Sequence[int]
    """0 or 1, T of them, aligned with `input_ids`."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)
