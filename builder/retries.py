"""When to ask a server again, and how long to wait before."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_RETRY_AFTER_S = 600.0
"""A server that asks for a longer wait gets this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How often, and waits that double, with jitter: many that failed together must not come back together."""

    attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0

    def backoff_s(self, failures: int) -> float:
        """Return how long to wait after `failures` in a row, where the server has not said."""
        doubled: float = min(self.longest_wait_s, self.first_wait_s * 2 ** (failures - 1))
        return doubled * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, keeps no secret


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy(Backoff):
    """For ranges of a file; attempts are those without a byte gained: any progress starts the count again."""

    timeout_s: float = 60.0
    """Without a byte, before a connection is given up."""

    def wait_s(self, failures: int, retry_after_s: float | None) -> float:
        """Return how long to wait after `failures` in a row: at least what the server asked for."""
        asked_s = 0.0 if retry_after_s is None else min(retry_after_s, MAX_RETRY_AFTER_S)
        return asked_s + self.backoff_s(failures)


class Patience:
    """Counts failures in a row of one range."""

    def __init__(self, policy: RetryPolicy, is_closed: threading.Event) -> None:
        """`is_closed` cuts a wait short."""
        self._policy = policy
        self._is_closed = is_closed
        self.failures = 0

    def note_progress(self) -> None:
        """Begin to count anew."""
        self.failures = 0

    def wait(self, retry_after_s: float | None = None) -> bool:
        """Count a failure and wait; False where there were too many, or the reader was closed."""
        self.failures += 1
        if self.failures >= self._policy.attempts or self._is_closed.is_set():
            return False
        return not self._is_closed.wait(self._policy.wait_s(self.failures, retry_after_s))


def retry_after_s(header: str) -> float | None:
    """Return how long Retry-After asks to wait: it holds seconds or a date; None where it says neither."""
    text = header.strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
