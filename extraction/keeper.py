"""What the client needs of whoever keeps checked samples: moved dumps in a run, or places in a shard."""

from __future__ import annotations

from typing import Protocol

from ..schemas.ledger import LedgerEntry
from ..schemas.prompt import Prompt
from ..schemas.run import RunRecord
from ..schemas.sample import CheckedSample
from .engines.protocol import Answer


class Keeper(Protocol):
    """Keeps samples for good; RunStore is the one that keeps their dumps. Its methods may be called from any thread."""

    @property
    def record(self) -> RunRecord:
        """run.json as it now is."""
        ...

    def attempt_number(self, num_tries: int) -> int:
        """Return the attempt number of the try after `num_tries` tries of this start."""
        ...

    def finish(self, prompt: Prompt, checked: CheckedSample, answer: Answer, attempt: int) -> LedgerEntry:
        """Keep a checked sample: when this returns it is on disk, its ledger line too, and its dumps are gone.

        Raises:
            DataError: a dump changed after it was checked; the dumps are gone, the sample may be asked again.
            StorageError: the disk is full or failed; the sample is not in the ledger.
        """
        ...

    def fail(self, prompt: Prompt, reason: str, attempt: int) -> None:
        """Record that a sample failed for good in this start."""
        ...
