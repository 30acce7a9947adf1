"""Stops a run whose `final` is not the LM head's input, before terabytes of it are written.

The engine says a next token for each prompt; the LM head, taken from the model's own files, must make the same of the
last row of `final`. Checked for the first samples and for one in a hundred after them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ..schemas.counts import counted
from ..schemas.errors import EngineError
from ..schemas.prompt import Prompt
from ..schemas.run import ModelFacts
from ..schemas.sample import NO_NEXT_TOKEN
from ..schemas.states import FINAL
from .engines.protocol import Answer
from .lm_head import LmHead, NoHeadError, Verdict, open_lm_head

NUM_FIRST = 8
"""Samples at the start that are all checked."""

EVERY = 100
"""After them one in so many: a head of Kimi-K2.5's shape costs 0.6 s of one core."""

STOP_COUNT = 2
STOP_SHARE = 0.25
"""So many samples, and this share of those checked, must disagree to stop the run. Right rows all agree: nothing but
the rounding of the logits is between the two tokens, and level ones count as equal."""


class WrongFinalError(EngineError):
    """The engine's next tokens are not what the LM head makes of the captured final states."""


class FinalCheck:
    """Holds the next tokens of one start of a run against its final states; may be called from any thread."""

    def __init__(self, model: ModelFacts, note: Callable[[str], None]) -> None:
        """`note` is told once if the check has to be left out, and of each sample that disagrees."""
        self._model = model
        self._note = note
        self._lock = threading.Lock()  # one sample at a time: each widens blocks of the head to float32
        self._head: LmHead | None = None
        self._is_off = False
        self._num_seen = self._num_checked = self._num_wrong = 0
        self._first_wrong = ""

    def check(self, prompt: Prompt, answer: Answer) -> None:
        """Check one sample whose dumps are known to be whole, if it is its turn.

        Raises:
            WrongFinalError: too many samples disagree.
        """
        with self._lock:
            self._num_seen += 1
            is_its_turn = self._num_seen <= NUM_FIRST or self._num_seen % EVERY == 0
            if self._is_off or not is_its_turn or answer.next_token == NO_NEXT_TOKEN:
                return
            head = self._opened()
            if head is not None:
                self._count(prompt, head.judge(answer.next_token, _last_row(answer)))

    def _opened(self) -> LmHead | None:
        """Return the head; it is opened at the first sample, when the engine has brought the model's files here."""
        if self._head is None:
            try:
                self._head = open_lm_head(self._model)
            except NoHeadError as reason:
                self._is_off = True
                self._note(f"next tokens are not held against `final`: {reason}")
        return self._head

    def _count(self, prompt: Prompt, verdict: Verdict) -> None:
        self._num_checked += 1
        if verdict.is_level:
            return
        self._num_wrong += 1
        what = (
            f"{prompt.key}: the engine's next token is {verdict.token}, but the LM head makes {verdict.likeliest} "
            f"of the last row of `final`"
        )
        self._first_wrong = self._first_wrong or what
        self._note(f"warning: {what}")
        if self._num_wrong >= STOP_COUNT and self._num_wrong >= STOP_SHARE * self._num_checked:
            raise WrongFinalError(
                f"{self._num_wrong:,} of {counted(self._num_checked, 'sample')} checked have final states that do "
                f"not give the engine's next token; first {self._first_wrong}",
                why="`final` is not the LM head's input (a norm missing or one too many), or rows are shifted",
                mend="The samples that this run has so far are wrong too: remove its folder. Then check the engine's "
                "version (`eaglehs doctor`), and that --model is what the server has loaded",
            )


def _last_row(answer: Answer) -> torch.Tensor:
    final_TH: torch.Tensor = torch.load(answer.dumps[-1], mmap=True, weights_only=True)[FINAL]
    return final_TH[-1]
