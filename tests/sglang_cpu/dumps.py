"""Reading what the plugin wrote, the plain way: torch.load, name by name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eaglehs.schemas.dump import DumpName
from torch import Tensor

_WRITTEN_IN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """All dumps of one request, joined; refuses gaps and overlaps."""

    ranges: tuple[tuple[int, int], ...]
    prompt_tokens: set[int | None]
    input_ids: list[int]
    states: Mapping[str, Tensor]


def wait_for_rows(folder: Path, rid: str, num_rows: int) -> list[DumpName]:
    """Wait until `num_rows` rows of a request are there; return its dumps."""
    deadline = time.monotonic() + _WRITTEN_IN_S
    while sum(name.num_rows for name in dumps_of(folder, rid)) < num_rows:
        assert time.monotonic() < deadline, f"{rid}: rows are missing: {sorted(p.name for p in folder.iterdir())}"
        time.sleep(0.02)
    return dumps_of(folder, rid)


def dumps_of(folder: Path, rid: str) -> list[DumpName]:
    """Return the dumps of a request that are there now, in row order."""
    names = [DumpName.parse(path.name) for path in folder.glob("*.pt")]
    return sorted((name for name in names if name.rid == rid), key=lambda name: name.start)


def read_captured(folder: Path, rid: str, num_tokens: int) -> Captured:
    """Wait for all rows of a request and join them."""
    names = wait_for_rows(folder, rid, num_tokens)
    records: list[dict[str, Any]] = [torch.load(folder / name.filename, weights_only=True, mmap=True) for name in names]
    for name, record in zip(names, records, strict=True):
        assert (record["rid"], record["start"], record["end"]) == (rid, name.start, name.end)
        assert len(record["input_ids"]) == name.num_rows
    borders = [0, *(name.end for name in names)]
    assert [name.start for name in names] == borders[:-1], f"{rid}: rows missing or double: {names}"
    states = [key for key in records[0] if key == "final" or key.startswith("layer_")]
    return Captured(
        ranges=tuple((name.start, name.end) for name in names),
        prompt_tokens={record["prompt_tokens"] for record in records},
        input_ids=torch.cat([record["input_ids"] for record in records]).tolist(),
        states={state: torch.cat([record[state] for record in records]) for state in states},
    )
