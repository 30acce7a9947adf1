"""Calls to the Hub that are tried again: waits that double, or as long as the server asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..schemas.progress import Progress
from .hub_errors import FAULTS, HubPlace, explain, is_ours, is_passing, retry_after_s, status_of
from .retries import Backoff

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRetryPolicy(Backoff):
    """For calls to the Hub, which are larger and fewer than ranges."""

    first_wait_s: float = 2.0
    longest_wait_s: float = 60.0
    longest_asked_s: float = 900.0
    """A server that asks for more is not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrier:
    """Calls the Hub; a fault that may pass is waited out, any other becomes a HubError."""

    place: HubPlace
    policy: HubRetryPolicy
    progress: Progress

    def call(self, doing: str, work: Callable[[], R], is_done: Callable[[], R | None] | None = None) -> R:
        """Return what `work` returns, after as many attempts as the policy allows.

        `is_done` is asked after each failure: a request may have succeeded though its answer was lost. What it returns,
        unless None, stands for the answer.

        Raises:
            HubError: with what to do.
        """
        for attempt in range(1, self.policy.attempts + 1):
            try:
                return work()
            except FAULTS as fault:
                if is_ours(fault):
                    raise
                if is_done is not None and (found := is_done()) is not None:
                    return found
                wait_s = self._wait_s(fault, attempt)
                if wait_s is None:
                    raise explain(fault, doing, self.place) from fault
                status = status_of(fault)
                why = f"answer {status}" if status else "no answer"
                self.progress.note(f"{doing}: {why}; trying again in {wait_s:.0f} s")
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _wait_s(self, fault: BaseException, attempt: int) -> float | None:
        """Return the seconds to wait, None where another attempt makes no sense."""
        if attempt == self.policy.attempts or not is_passing(fault):
            return None
        asked = retry_after_s(fault)
        if asked is not None:
            return asked if asked <= self.policy.longest_asked_s else None
        return self.policy.backoff_s(attempt)
