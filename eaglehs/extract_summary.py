"""What one `extract` did, in numbers: from the ledger, the prompts and the client's outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .builder.pack import PackSummary
    from .builder.publish import PublishResult
    from .extraction.client import Failure, Outcome
    from .extraction.run_store import RunStore
    from .schemas.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSummary:
    """What one `extract` did."""

    run: str
    dataset: PackSummary | None
    """None where the run keeps its dumps."""

    published: PublishResult | None
    """None where it was not pushed."""

    engine: str
    num_samples: int
    """Finished samples in the run now."""

    num_new: int
    """Of those, the ones computed by this start."""

    num_tokens: int
    num_trainable: int
    """Tokens of the finished samples with loss mask 1."""

    num_failed: int
    failures: tuple[Failure, ...]
    failed: dict[str, int]
    """Class of reason -> samples that failed in this start."""

    skipped: dict[str, int]
    """Reason -> rows of the prompt files that were left out."""

    state_norms: dict[str, float]
    """State -> mean L2 norm of its rows, weighted by tokens."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """What a start ended with."""

    store: RunStore
    outcome: Outcome
    dataset: PackSummary | None
    published: PublishResult | None = None


def summarize(done: Done, prompts: Sequence[Prompt], seconds: float) -> ExtractSummary:
    """Return the numbers of a start; `prompts` are all of the run."""
    import numpy as np

    from .builder.run_reader import failures_by_class

    store, outcome = done.store, done.outcome
    finished = {entry.key: entry for entry in store.ledger.finished()}
    num_tokens = sum(entry.num_tokens for entry in finished.values())
    states = next(iter(finished.values())).state_norms if finished else {}
    return ExtractSummary(
        run=str(store.folder.root),
        dataset=done.dataset,
        published=done.published,
        engine=store.record.engine.name,
        num_samples=len(finished),
        num_new=outcome.num_done,
        num_tokens=num_tokens,
        num_trainable=sum(int(np.sum(prompt.loss_mask)) for prompt in prompts if prompt.key in finished),
        num_failed=len(outcome.failures),
        failures=outcome.failures,
        failed=failures_by_class({failure.key: failure.reason for failure in outcome.failures}),
        skipped=store.record.prompts.skipped,
        state_norms={
            state: sum(entry.state_norms[state] * entry.num_tokens for entry in finished.values()) / num_tokens
            for state in states
        },
        seconds=round(seconds, 3),
    )
