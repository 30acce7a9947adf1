"""How long work tells what it has done, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Something that hears of finished work; the command shows it as a bar or as lines."""

    def begin(self, title: str, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        """Start a new stage of the work, with as much to do; counts start from zero. 0 stands for not known."""

    def advance(self, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        """Add what was finished since the last call. May be called from any thread."""

    def note(self, message: str) -> None:
        """Show one line about what is going on (`server is loading weights, 3 min`)."""


class Silent:
    """Progress that nobody watches."""

    def begin(self, title: str, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        """Do nothing."""

    def advance(self, *, num_samples: int = 0, num_tokens: int = 0, size_bytes: int = 0) -> None:
        """Do nothing."""

    def note(self, message: str) -> None:
        """Do nothing."""
