"""What is in a run or a dataset, in numbers: counts, layers, lengths, sizes; or one sample, by key or the user's id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..schemas.codec import read_record
from ..schemas.errors import UsageError
from ..schemas.folders import no_folder
from ..schemas.index import ArrayPlace, IndexRow
from ..schemas.ledger import LedgerEntry
from ..schemas.manifest import MANIFEST_FILENAME, DatasetFolder, Manifest
from ..schemas.run import RUN_FILENAME, ModelFacts
from ..schemas.sample import DumpRef
from ..schemas.states import Codec
from .index_store import read_index
from .pushed_shards import PushedShards
from .run_reader import Run, failures_by_class, open_run


class UnknownSampleError(UsageError):
    """No sample has the key or id that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long samples are, in tokens."""

    shortest: int
    median: int
    mean: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run or a dataset in numbers."""

    path: str
    kind: str
    """`run` or `dataset`."""

    run_id: str
    created_at: str
    model: ModelFacts
    engine: str
    layers: tuple[int, ...]
    capture: str
    num_samples: int
    """Finished samples of a run; samples of a dataset."""

    num_planned: int
    """Prompts of the run."""

    num_tokens: int
    num_trainable: int
    size_bytes: int
    """Of the dumps or shards."""

    num_files: int
    failed: dict[str, int]
    """Reason -> samples."""

    skipped: dict[str, int]
    """Reason -> rows of the prompt files that were left out."""

    state_norms: dict[str, float]
    lengths: Lengths | None
    """None where no sample is finished."""

    on_hub: str = ""
    """Which shards of the dataset are on the Hub and not here, and where; empty where all are here."""

    codec: Codec = Codec.PLAIN
    """How a dataset's states are stored; a run's are always plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample in numbers."""

    path: str
    key: str
    id: str
    source: str
    status: str
    """`packed`, `done`, `failed` or `not extracted yet`."""

    reason: str
    num_tokens: int
    num_trainable: int
    next_token: int
    shard: str
    """Empty in a run."""

    arrays: dict[str, ArrayPlace]
    """Place in the shard; empty in a run."""

    dumps: tuple[DumpRef, ...]
    """Empty in a dataset."""

    state_norms: dict[str, float]
    """Empty in a dataset."""


def inspect_path(path: Path) -> Overview:
    """Return a run or dataset in numbers; no array is read.

    Raises:
        UsageError: there is neither at `path`.
        RecordError: a record of it can't be read.
    """
    if _is_run(path):
        with open_run(path) as run:
            return _run_overview(run)
    manifest = read_record(Manifest, DatasetFolder(path).manifest)
    pushed = PushedShards(DatasetFolder(path))
    remote = pushed.all_remote(manifest.shards)
    lengths = [row.num_tokens for row in read_index(DatasetFolder(path).index)]
    return Overview(
        path=str(path),
        kind="dataset",
        run_id=manifest.run_id,
        created_at=manifest.created_at,
        model=manifest.model,
        engine=manifest.engine.name,
        layers=manifest.layers,
        capture=manifest.capture,
        num_samples=manifest.totals.num_samples,
        num_planned=manifest.prompts.num_prompts,
        num_tokens=manifest.totals.num_tokens,
        num_trainable=manifest.totals.num_trainable,
        size_bytes=manifest.totals.size_bytes,
        num_files=len(manifest.shards),
        failed=manifest.failed,
        skipped=manifest.prompts.skipped,
        state_norms=manifest.state_norms,
        lengths=_lengths(lengths),
        on_hub=pushed.told(remote) if remote else "",
        codec=manifest.codec,
    )


def inspect_sample(path: Path, name: str) -> SampleView:
    """Return the sample whose key, or else whose id, is `name`.

    Raises:
        UnknownSampleError: there is none.
        UsageError: there is neither run nor dataset at `path`.
    """
    if _is_run(path):
        with open_run(path) as run:
            return _run_sample(run, name)
    by_id: IndexRow | None = None
    for row in read_index(DatasetFolder(path).index):
        if row.key == name:
            return _row_view(path, row)
        by_id = row if row.id == name and by_id is None else by_id
    if by_id is None:
        raise _unknown(path, name)
    return _row_view(path, by_id)


def _is_run(path: Path) -> bool:
    if (path / RUN_FILENAME).exists():
        return True
    if DatasetFolder(path).manifest.exists():
        return False
    what = f"{path} is neither a run nor a dataset" if path.is_dir() else no_folder(path)
    raise UsageError(
        what, why=f"A run has {RUN_FILENAME}, a packed dataset {MANIFEST_FILENAME}", mend="Give one of their folders"
    )


def _run_overview(run: Run) -> Overview:
    record, done = run.record, [entry for entry in run.entries.values() if entry.dumps]
    sums: dict[str, float] = {}
    for entry in done:
        for state, norm in entry.state_norms.items():
            sums[state] = sums.get(state, 0.0) + norm * entry.num_tokens
    num_tokens = sum(entry.num_tokens for entry in done)
    return Overview(
        path=str(run.folder.root),
        kind="run",
        run_id=record.run_id,
        created_at=record.created_at,
        model=record.model,
        engine=record.engine.name,
        layers=record.layers,
        capture=record.capture,
        num_samples=len(done),
        num_planned=len(run.prompts),
        num_tokens=num_tokens,
        num_trainable=sum(run.prompts.num_trainable_of(entry.key) for entry in done),
        size_bytes=sum(dump.size_bytes for entry in done for dump in entry.dumps),
        num_files=sum(len(entry.dumps) for entry in done),
        failed=failures_by_class(run.failed),
        skipped=record.prompts.skipped,
        state_norms={state: total / num_tokens for state, total in sums.items()},
        lengths=_lengths([entry.num_tokens for entry in done]),
    )


def _run_sample(run: Run, name: str) -> SampleView:
    key = name if name in run.prompts else run.prompts.key_of_id(name)
    if key is None:
        raise _unknown(run.folder.root, name)
    prompt = run.prompts.prompt(key)
    entry: LedgerEntry | None = run.entries.get(key)
    return SampleView(
        path=str(run.folder.root),
        key=key,
        id=prompt.id,
        source=prompt.source,
        status=entry.status.value if entry else "not extracted yet",
        reason=entry.reason if entry else "",
        num_tokens=prompt.num_tokens,
        num_trainable=run.prompts.num_trainable_of(key),
        next_token=entry.next_token if entry else -1,
        shard="",
        arrays={},
        dumps=entry.dumps if entry else (),
        state_norms=entry.state_norms if entry else {},
    )


def _row_view(path: Path, row: IndexRow) -> SampleView:
    return SampleView(
        path=str(path),
        key=row.key,
        id=row.id,
        source=row.source,
        status="packed",
        reason="",
        num_tokens=row.num_tokens,
        num_trainable=row.num_trainable,
        next_token=row.next_token,
        shard=row.shard,
        arrays=row.arrays,
        dumps=(),
        state_norms={},
    )


def _lengths(lengths: Sequence[int]) -> Lengths | None:
    if not lengths:
        return None
    return Lengths(
        shortest=min(lengths),
        median=int(np.median(lengths)),
        mean=round(float(np.mean(lengths)), 1),
        longest=max(lengths),
    )


def _unknown(path: Path, name: str) -> UnknownSampleError:
    return UnknownSampleError(f"{path} has no sample with key or id {name!r}", mend="Keys stand in its index or ledger")
