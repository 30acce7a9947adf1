"""Which rows of one request have come, told by the names of its dumps alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.dump import DumpName, DumpNameError


@dataclass(slots=True, kw_only=True)
class RowsOf:
    """The dumps of one request of `num_tokens` tokens, as they come in any order."""

    rid: str
    num_tokens: int
    names: list[DumpName] = field(default_factory=list)
    """By first row; whole only if they lie end to end."""

    def add(self, name: DumpName) -> bool:
        """Take a dump in; return False for one of rows that the prompt does not have (a decode step)."""
        if name.start >= self.num_tokens:
            return False
        self.names.append(name)
        self.names.sort(key=lambda dump: (dump.start, dump.end))
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the dumps lie end to end from 0 to `num_tokens`."""
        edges = [0, *(name.end for name in self.names)]
        starts = [*(name.start for name in self.names), self.num_tokens]
        return edges == starts

    @property
    def fault(self) -> str:
        """What can't come right any more by waiting: rows that came twice, or beyond the prompt; else empty."""
        end = 0
        for name in self.names:
            if name.start < end:
                return f"rows {name.start}..{min(end, name.end) - 1} came twice"
            end = name.end
        if end > self.num_tokens:
            return f"rows up to {end - 1} came for {counted(self.num_tokens, 'token')}"
        return ""

    @property
    def missing(self) -> list[tuple[int, int]]:
        """The gaps, as (first row, row after the last)."""
        gaps, end = [], 0
        for name in self.names:
            if name.start > end:
                gaps.append((end, name.start))
            end = max(end, name.end)
        if end < self.num_tokens:
            gaps.append((end, self.num_tokens))
        return gaps


def dumps_in(folder: Path, prefix: str = "") -> Iterator[DumpName]:
    """Yield the dumps in a folder whose file name starts with `prefix`, in no order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(prefix):
                continue
            try:
                yield DumpName.parse(entry.name)
            except DumpNameError:
                continue
