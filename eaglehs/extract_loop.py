"""One start of a run, through an engine that may go down on the way.

    all at once -> the engine goes down: prompts under way are suspects -> a fresh engine -> the others at once,
      the suspects last and one by one -> it goes down again with one suspect alone: that prompt is set aside

A prompt that kills servers (a kernel that asserts, a batch that runs out of memory) so costs two restarts and one
failed sample, not the run. Only a server that we started is started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .schemas.counts import counted
from .schemas.errors import EngineError
from .schemas.progress import Progress
from .schemas.prompt import Prompt
from .schemas.run import EngineFacts

if TYPE_CHECKING:
    from .extraction.client import Client, Outcome
    from .extraction.engines.protocol import Engine, EngineDownError
    from .extraction.run_store import RunStore

MAX_DEATHS = 2
"""Times that the engine may go down with a prompt under way; the last time with that prompt alone."""

SET_ASIDE = "the server went down twice while it ran this prompt"
"""Begins the reason of a sample that was set aside, in the ledger; the next start takes such a one last, alone."""


class RestartsSpentError(EngineError):
    """The server goes down again and again, whatever runs on it."""

    def __init__(self, max_restarts: int, fault: EngineDownError) -> None:
        """`fault` is the last one."""
        self.fault = fault
        super().__init__(
            f"the server went down {counted(max_restarts + 1, 'time')}, more often than "
            f"--max-restarts {max_restarts} allows",
            why=f"Last: {fault}",
            mend="Mend the cause and run the same command again: finished samples are kept",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Where engines come from."""

    open: Callable[[], AbstractContextManager[Engine]]
    client_of: Callable[[Engine], Client]
    max_restarts: int
    """Restarts that do not single out a prompt; those that do are bounded by `max_failed`. 0: none at all."""

    max_failed: int


class ExtractLoop:
    """Brings all prompts to an end, with as many engines as it takes."""

    def __init__(self, engines: Engines, store: RunStore, progress: Progress) -> None:
        """The store is open; each engine is opened and closed here."""
        from .extraction.client import Tally

        self._engines = engines
        self._store = store
        self._progress = progress
        self._tally = Tally()
        self._num_restarts = 0
        self._deaths = Counter(
            {entry.key: MAX_DEATHS - 1 for entry in store.ledger.failed() if entry.reason.startswith(SET_ASIDE)}
        )

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        """Extract all `prompts`.

        Raises:
            RestartsSpentError: the engine went down too often.
            TooManyFailuresError: more samples than may failed.
            EngineError, StorageError: an engine did not start, or failed so that a fresh one would too.
        """
        while pending := self._pending(prompts):
            down = self._use_one_engine(pending)
            if down is not None:
                self._judge(*down)
        return self._tally.outcome()

    def _pending(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        given_up = {failure.key for failure in self._tally.failures}
        return [prompt for prompt in self._store.pending(prompts) if prompt.key not in given_up]

    def _use_one_engine(self, pending: Sequence[Prompt]) -> tuple[EngineDownError, tuple[Prompt, ...]] | None:
        """Run what is pending; return why the engine went down with what under way, or None when all is done."""
        from .extraction.engines.protocol import EngineDownError
        from .extraction.interrupts import run_interruptible

        with self._engines.open() as engine:
            self._tell_changes(engine.facts)
            self._store.begin(engine.facts)
            client = self._engines.client_of(engine)
            client.tally = self._tally
            try:
                run_interruptible(self._run_client(client, pending))
            except EngineDownError as fault:
                return fault, tuple(client.under_way.values())
        return None

    def _tell_changes(self, facts: EngineFacts) -> None:
        from .extraction.engine_changes import engine_changes

        changes = list(engine_changes(self._store.record.engine, facts))
        if changes and any(self._store.ledger.finished()):
            self._progress.note(
                f"warning: the run goes on with another engine than before ({'; '.join(changes)}): the rows of "
                "finished and new samples may differ by that, and run.json and the card name the new one"
            )

    async def _run_client(self, client: Client, pending: Sequence[Prompt]) -> None:
        await client.run([prompt for prompt in pending if not self._deaths[prompt.key]], self._progress)
        suspects = [prompt for prompt in pending if self._deaths[prompt.key]]
        await client.run(suspects, self._progress, concurrency=1)

    def _judge(self, fault: EngineDownError, under_way: Sequence[Prompt]) -> None:
        """Set the prompt aside that killed the engine, or count a restart.

        Raises:
            EngineDownError, RestartsSpentError: the engine is not to be started again.
        """
        if not self._engines.max_restarts:
            raise fault
        self._deaths.update(prompt.key for prompt in under_way)
        if len(under_way) == 1 and self._deaths[under_way[0].key] >= MAX_DEATHS:
            self._set_aside(under_way[0], fault)
            return
        self._num_restarts += 1
        if self._num_restarts > self._engines.max_restarts:
            raise RestartsSpentError(self._engines.max_restarts, fault) from None
        self._progress.note(
            f"{fault} Starting it again (restart {self._num_restarts} of {self._engines.max_restarts}); "
            f"{counted(len(under_way), 'prompt that was', 'prompts that were')} under way come last, one by one"
        )

    def _set_aside(self, prompt: Prompt, fault: EngineDownError) -> None:
        from .extraction.client import Failure

        reason = f"{SET_ASIDE}: {fault.what}"
        self._store.fail(prompt, reason, self._store.attempt_number(0))
        self._progress.note(f"failed: {prompt.id}: {reason}")
        failure = Failure(key=prompt.key, id=prompt.id, reason=reason)
        self._tally.fail(failure, self._engines.max_failed)
