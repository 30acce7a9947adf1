"""What computes the states of a run now, held against what did at its last start: rows may differ by it."""

from __future__ import annotations

from collections.abc import Iterator

from ..schemas.run import EngineFacts
from .capture_rules import parse_arguments
from .server_command import NO_WARMUP

NO_MATTER = frozenset({"--host", "--port", "--nccl-port", "--dist-init-addr", "--api-key", "--log-level", NO_WARMUP})
"""SGLang's flags that change no row."""


def engine_changes(before: EngineFacts, now: EngineFacts) -> Iterator[str]:
    """Yield what is other, in words; nothing where `before` is of a run that was never started."""
    if not before.versions:
        return
    for package in sorted({*before.versions, *now.versions}):
        then, here = (facts.versions.get(package, "none") for facts in (before, now))
        if then != here:
            yield f"{package} {then} then, {here} now"
    if before.device != now.device:
        yield f"device {before.device} then, {now.device} now"
    if before.command and now.command:  # a server that we did not start may not tell its command
        old, new = _arguments(before), _arguments(now)
        yield from (f"{argument} then, not now" for argument in sorted(old - new))
        yield from (f"{argument} now, not then" for argument in sorted(new - old))


def _arguments(facts: EngineFacts) -> set[str]:
    pairs = parse_arguments(facts.command)
    return {flag if value is True else f"{flag} {value}" for flag, value in pairs if flag not in NO_MATTER}
