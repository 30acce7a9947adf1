"""What is killed when: the table of cases, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

NUM_PROMPTS = 64
SEED = 1
"""Of the cases that the tests run."""

VOCAB = 500
TWO_STEP = "two-step"
ONE_STEP = "one-step"
MODES = (TWO_STEP, ONE_STEP)


class Victim(StrEnum):
    """Who gets which signal."""

    CLIENT = "client"
    SERVER = "server"
    SCHEDULER = "scheduler"
    ALL = "all"
    TERM = "client, TERM"
    CTRL_C = "client, Ctrl-C"
    CTRL_C_TWICE = "client, Ctrl-C twice"


KEEPS_SERVER = (Victim.CLIENT, Victim.CLIENT, Victim.CLIENT, Victim.TERM, Victim.CTRL_C, Victim.CTRL_C_TWICE)
"""Drawn from where one server is kept up over many kills."""

OWN_SERVER = (Victim.SERVER, Victim.SCHEDULER, Victim.ALL, Victim.CLIENT, Victim.TERM, Victim.CTRL_C_TWICE)
"""In turn, where each extraction has a server of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kill."""

    number: int
    mode: str
    victim: Victim
    has_own_server: bool
    concurrency: int
    num_finished: int
    """Samples that are finished when the clock starts; -1: it starts with the command."""

    delay_s: float

    @property
    def moment(self) -> str:
        """The moment in words."""
        start = "the start" if self.num_finished < 0 else f"{self.num_finished} samples"
        return f"{self.delay_s * 1000:.0f} ms after {start}"


def draw(seed: int, mode: str, *, num_kept: int, num_own: int) -> list[Case]:
    """Return the cases of a seed: kills of clients of one server, then of extractions with their own."""
    chance = random.Random(f"{seed} {mode}")
    cases = []
    for number in range(num_kept + num_own):
        is_own = number >= num_kept
        is_early = not is_own and chance.random() < 0.15
        cases.append(
            Case(
                number=number,
                mode=mode,
                victim=OWN_SERVER[(number - num_kept) % len(OWN_SERVER)] if is_own else chance.choice(KEEPS_SERVER),
                has_own_server=is_own,
                concurrency=(1, 8)[number % 2],
                num_finished=-1 if is_early else chance.randrange(0, NUM_PROMPTS - 2),
                delay_s=chance.random() * (1.5 if is_early else 0.03),
            )
        )
    return cases


def of_both_modes(*, num_kept: int, num_own: int) -> list[Case]:
    """Return the cases that the tests run, two-step before one-step."""
    return [case for mode in MODES for case in draw(SEED, mode, num_kept=num_kept, num_own=num_own)]


def write_prompts(path: Path) -> None:
    """Write the prompts: ids, most of them short, some of several prefill chunks of 64."""
    chance = random.Random(0)
    rows = []
    for number in range(NUM_PROMPTS):
        length = 130 if number % 9 == 4 else chance.randrange(4, 40)
        rows.append({"id": f"Kill.{number}", "input_ids": [chance.randrange(3, VOCAB) for _ in range(length)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_table(rows: Sequence[Sequence[object]]) -> str:
    """Return lines of columns of even width; the first row is the head."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
