"""What the client needs of an engine: the two calls, and nothing about how states come to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from ...schemas.errors import DataError, EngineError
from ...schemas.prompt import Prompt
from ...schemas.run import EngineFacts


class EngineDownError(EngineError):
    """The engine has died or hangs. A fresh one may go on: prompts under way are suspects, not guilty."""


class PassingError(DataError):
    """A request failed for a reason that may pass: asked again after a while, the same prompt may go through."""

    concerns_all: ClassVar[bool] = False
    """Whether it is the engine's: when it outlasts all waiting and nothing else is answered either, the engine is
    down and the prompt is not to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine returned for one prompt."""

    dumps: tuple[Path, ...]
    """Dumps of this request in row order, in the spool; they cover 0..T. The caller moves or removes them."""

    next_token: int
    """The token chosen after the last row at temperature 0."""

    cached_tokens: int
    """Tokens that the engine took from a prefix cache instead of computing them; must be 0."""

    def remove_dumps(self) -> None:
        """Free the spool of the dumps."""
        for dump in self.dumps:
            dump.unlink(missing_ok=True)


class Engine(Protocol):
    """Something that runs prompts through the target model and dumps their states."""

    concurrency: int
    """Most requests that may be under way at once; 1 for an engine that computes in this process."""

    @property
    def facts(self) -> EngineFacts:
        """What to write into run.json; complete once the engine is started."""
        ...

    async def capture(self, prompt: Prompt, rid: str) -> Answer:
        """Run one prompt and return when its dumps are whole in the spool.

        Raises:
            PassingError: this prompt failed and is to be asked again after a while.
            DataError: this prompt failed (refused, dumps missing); others may go on.
            EngineDownError: the engine died or hangs.
            EngineError: the engine itself failed; nothing more can be asked of it.
        """
        ...
