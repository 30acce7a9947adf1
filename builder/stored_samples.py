"""A few samples of a run or a dataset as tensors, whichever of the two it is: for checks that want rows, not bytes.

open_stored       a run or a dataset -> what samples it has
choose_samples    some of them: spread over the whole, short ones preferred but not alone, the same for the same seed
Stored.read       one of them -> ids, the first rows of each state, the last row of `final`

Shape legend: T tokens, H hidden width.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..schemas.errors import UsageError
from ..schemas.index import IndexRow
from ..schemas.ledger import SampleStatus
from ..schemas.run import RUN_FILENAME, ModelFacts
from ..schemas.states import FINAL, INPUT_IDS, state_names
from .catalog import Catalog, open_catalog
from .dump_reader import Dump, read_dump
from .run_reader import Run, open_run
from .sample_source import SampleSource

_CANDIDATES = 16
"""Samples of a stretch that are drawn; every second stretch gives its shortest of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A sample that is there."""

    key: str
    num_tokens: int
    next_token: int
    place: str
    """File that holds it, within the run or dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """The rows of one sample that were asked for."""

    key: str
    input_ids: Tensor
    """int32 [T], T at most what was asked for."""

    states: dict[str, Tensor]
    """bfloat16 [T, H] by name."""

    last_final: Tensor
    """bfloat16 [H]: the last row of the whole sample's `final`."""


class Stored(Protocol):
    """What `open_stored` gives: the same of a run and of a dataset."""

    model: ModelFacts
    layers: tuple[int, ...]
    listed: Sequence[Listed]

    def read(self, key: str, max_tokens: int) -> StoredSample:
        """Return one sample; DataError where its files are damaged or gone."""
        ...


@contextmanager
def open_stored(path: Path) -> Iterator[Stored]:
    """Open a run or a dataset.

    Raises:
        UsageError: it is neither, or holds no finished sample.
        DataError: its records are damaged.
    """
    if (path / RUN_FILENAME).is_file():
        with open_run(path) as run:
            if run.record.packing is not None:
                raise UsageError(
                    f"{path} keeps no dumps: its samples were packed while they were extracted",
                    mend=f"Give the dataset, {run.record.packing.dataset}",
                )
            yield _filled(path, _StoredRun(run))
    else:
        catalog = open_catalog(path, takes_remote=True)
        with SampleSource(catalog) as source:
            yield _filled(path, _StoredDataset(catalog, source))


def choose_samples(listed: Sequence[Listed], count: int, seed: int) -> tuple[Listed, ...]:
    """Return `count` samples, or all if there are no more: one of each of `count` stretches of equal length.

    Every second stretch gives the shortest of a few that are drawn, the others the first that is drawn.
    """
    draw = random.Random(seed)  # noqa: S311 - a choice that anyone can make again
    count = min(count, len(listed))
    chosen = []
    for number in range(count):
        stretch = listed[number * len(listed) // count : (number + 1) * len(listed) // count]
        drawn = draw.sample(stretch, min(_CANDIDATES, len(stretch)))
        chosen.append(drawn[0] if number % 2 else min(drawn, key=lambda sample: sample.num_tokens))
    return tuple(chosen)


def _filled(path: Path, stored: Stored) -> Stored:
    if not stored.listed:
        raise UsageError(f"{path} holds no finished sample")
    return stored


class _StoredDataset:
    def __init__(self, catalog: Catalog, source: SampleSource) -> None:
        self.model = catalog.manifest.model
        self.layers = catalog.manifest.layers
        self.listed: Sequence[Listed] = [
            Listed(key=row.key, num_tokens=row.num_tokens, next_token=row.next_token, place=row.shard)
            for row in catalog.rows
        ]
        self._source = source
        self._rows = {row.key: row for row in catalog.rows}

    def read(self, key: str, max_tokens: int) -> StoredSample:
        row = self._rows[key]
        states = state_names(self.layers)
        arrays = self._source.read(row, (INPUT_IDS, *states), max_tokens=max_tokens)
        return StoredSample(
            key=key,
            input_ids=arrays[INPUT_IDS],
            states={name: arrays[name] for name in states},
            last_final=self._last_final(row),
        )

    def _last_final(self, row: IndexRow) -> Tensor:
        with self._source.open_rows(row, (FINAL,)) as sample:  # only the row that is used is read, or its block
            return sample.rows(FINAL, row.num_tokens - 1, row.num_tokens)[-1]


class _StoredRun:
    def __init__(self, run: Run) -> None:
        self.model = run.record.model
        self.layers = run.record.layers
        self.listed: Sequence[Listed] = [
            Listed(
                key=key,
                num_tokens=entry.num_tokens,
                next_token=entry.next_token,
                place=str(run.dump_paths(key)[0].relative_to(run.folder.root)),
            )
            for key, entry in run.entries.items()
            if entry.status is SampleStatus.DONE and not entry.shard
        ]
        self._run = run

    def read(self, key: str, max_tokens: int) -> StoredSample:
        dumps = [read_dump(path, self._run.layout) for path in self._run.dump_paths(key)]
        ids = np.asarray(self._run.prompts.prompt(key).input_ids, dtype=np.int32)[:max_tokens]
        return StoredSample(
            key=key,
            input_ids=torch.from_numpy(ids.copy()),
            states={name: self._rows(dumps, name, max_tokens) for name in state_names(self.layers)},
            last_final=self._state(dumps[-1], FINAL)[-1],
        )

    def _rows(self, dumps: Sequence[Dump], name: str, max_tokens: int) -> Tensor:
        return torch.cat([self._state(dump, name) for dump in dumps if dump.name.start < max_tokens])[:max_tokens]

    def _state(self, dump: Dump, name: str) -> Tensor:
        """Return one state of a dump, bfloat16 [rows, H], mapped."""
        place, width = dump.arrays[name], self._run.record.model.hidden_size
        bits = np.memmap(dump.path, dtype="<i2", mode="c", offset=place.offset, shape=(place.length // 2,))
        return torch.from_numpy(bits).view(torch.bfloat16).view(-1, width)
