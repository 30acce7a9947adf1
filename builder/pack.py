"""Run to dataset.

    open_run          prompts, ledger                                          builder/run_reader
      -> plan_run     all prompts of the run over shards, in order             builder/plan
      -> claim        lock the folder; what is finished, foreign or left over  builder/pack_state
      -> shards       by worker threads; each renamed and recorded when whole  builder/shard_packer (ShardMaker)
      -> finish       index, then manifest, by rename

The plan is made over all prompts, done or not: a sample that is missing is taken out of its own shard, and the other
shards are the same bytes as if it were there. So they stay when a later run has finished it. An extraction that packs
as it goes (builder/one_step.py) ends in the same `pack_shards`, with another maker of shards.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ..schemas.atomic import staged, sync_folder
from ..schemas.codec import write_record
from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from ..schemas.manifest import DatasetFolder, Manifest, Totals
from ..schemas.progress import Progress
from ..schemas.published import published_manifest
from ..schemas.sharding import Sharding
from ..schemas.states import Codec
from .index_store import index_schema, write_index
from .pack_folder import check_space, clear_old, drop_if_empty, is_finished, open_folder, recoding_bytes
from .pack_state import Claim, PackedShard, PackState, SetAside, locked
from .plan import Plan, ShardPlan, plan_by
from .plan_warnings import plan_warnings
from .run_reader import Run, failures_by_class, open_run
from .sequential_file import BufferPool
from .shard_packer import PackTarget, ShardPacker, ShardResult
from .side_by_side import side_by_side

PACK_FORMAT = 1
"""Raised when the same run and settings would pack to other bytes."""

NOT_EXTRACTED = "not extracted yet"


class NothingToPackError(DataError):
    """No sample of the run can be packed."""


class PackedAlreadyError(UsageError):
    """The run was extracted and packed in one step: it has no dumps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings(Sharding):
    """How to pack."""

    workers: int = 1
    """Shards made at once; the bytes do not depend on it."""

    allow_partial: bool = False
    """Pack a run that is not finished, without the samples that are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """What a pack has done."""

    dataset: str
    totals: Totals
    num_shards: int
    num_reused: int
    """Shards that an earlier pack had finished."""

    failed: dict[str, int]
    """Reason -> samples of the run that are not in the dataset."""

    set_aside: tuple[SetAside, ...]
    """Samples whose dumps were refused now."""

    warnings: tuple[str, ...]
    is_unchanged: bool
    """The dataset was there already, whole, of the same run and settings; nothing was written."""


class ShardMaker(Protocol):
    """What makes the shards of a dataset; called by several threads, each with a shard of its own."""

    def make(self, shard: ShardPlan, fingerprint: str, stop: threading.Event) -> ShardResult:
        """Make the file of `shard` under its name, or none where no sample is left; `stop` ends the work early."""
        ...

    def tidy(self, name: str) -> None:
        """Remove what is not needed once the shard and its record are on disk."""
        ...

    def prepare(self, claim: Claim, todo: Sequence[Job]) -> None:
        """Remove manifest and index, and what is in the way of the shards to do; refuse what the disk can't hold."""
        ...

    @property
    def parts(self) -> Collection[Path]:
        """Hidden files in the dataset's folder that the maker needs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One shard of the plan, without the samples that the run has not."""

    shard: ShardPlan
    fingerprint: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    manifest: Manifest
    shards: Mapping[str, PackedShard]
    num_reused: int
    is_unchanged: bool


def pack_run(run: Path, dataset: Path, settings: PackSettings, progress: Progress) -> PackSummary:
    """Pack the run at `run` into the folder `dataset`; no card is written.

    Samples with bad dumps are set aside and listed in the summary. An interrupted pack is taken up at the unfinished
    shard. Any number of workers gives the same bytes.

    Raises:
        UsageError: no run, unfinished, shard size too large, the folder holds another run's dataset or foreign files,
            or another process packs into it.
        NothingToPackError: no sample is good; nothing is left behind.
        DataError: run.json, prompts or ledger can't be read.
        StorageError: the disk is full or failed; finished shards are kept.
    """
    _check_apart(run, dataset)
    with open_run(run) as source:
        _check_has_dumps(source)
        if not settings.allow_partial:
            source.check_finished()
        if source.num_done == 0:
            raise _nothing(source, failures_by_class(source.failed))
        plan = plan_run(source, settings)
        folder = DatasetFolder(dataset)
        existed = dataset.exists()
        with locked(dataset):
            try:
                maker = _FromDumps(source, plan, folder, progress, workers=settings.workers)
                return pack_shards(Work(source, plan, folder, maker, progress), workers=settings.workers)
            except BaseException:
                drop_if_empty(folder, existed=existed)
                raise


def _check_apart(run: Path, dataset: Path) -> None:
    if run.resolve().is_relative_to(dataset.resolve()):
        raise UsageError(
            f"the run {run} would lie in the dataset's folder {dataset}, and dumps beside shards",
            mend="Give the dataset a folder of its own with --out",
        )


def plan_run(run: Run, sharding: Sharding) -> Plan:
    """Return the plan of all prompts of a run."""
    return plan_by(sharding, run.prompts.planned(), run.layout)


@dataclass(frozen=True, slots=True)
class Work:
    """One dataset to be made; the caller holds the folder's lock."""

    run: Run
    plan: Plan
    folder: DatasetFolder
    maker: ShardMaker
    progress: Progress

    @property
    def state(self) -> PackState:
        """The folder's hidden records."""
        return PackState(self.folder, self.plan.stored_layout)


def pack_shards(work: Work, *, workers: int) -> PackSummary:
    """Make all shards that are not there yet, then index and manifest.

    Raises:
        NothingToPackError, ForeignFolderError, StorageError: as `pack_run`.
    """
    run, plan, folder, progress, state = work.run, work.plan, work.folder, work.progress, work.state
    jobs = list(plan_jobs(run, plan))
    claim = open_folder(folder, state, run.record.run_id, [job.shard.name for job in jobs], work.maker.parts)
    done = {job.shard.name: state.finished(job.shard.name, job.fingerprint) for job in jobs}
    shards = {name: record for name, record in done.items() if record is not None and not record.set_aside}
    todo = [job for job in jobs if job.shard.name not in shards]
    num_reused = len(shards)
    if not todo:
        manifest = _manifest(run, plan, shards)
        if is_finished(folder, manifest):
            return _summary(folder, plan, _Outcome(manifest, shards, num_reused, is_unchanged=True))
    for warning in plan_warnings(plan):
        progress.note(f"warning: {warning}")
    if folder.manifest.exists():
        progress.note(
            f"{folder.root} holds this run packed otherwise; it is replaced: {counted(len(todo), 'shard')} to do"
        )
    work.maker.prepare(claim, todo)
    shards |= _make_shards(work, todo, workers)
    ordered = {job.shard.name: shards[job.shard.name] for job in jobs}
    manifest = _manifest(run, plan, ordered)
    if manifest.totals.num_samples == 0:
        raise _nothing(run, manifest.failed)
    _finish(folder, state, manifest)
    return _summary(folder, plan, _Outcome(manifest, ordered, num_reused, is_unchanged=False))


class _FromDumps:
    """Makes shards of the dumps of a run."""

    def __init__(self, run: Run, plan: Plan, folder: DatasetFolder, progress: Progress, *, workers: int) -> None:
        self._names = {shard.name for shard in plan.shards}
        self._layout = plan.stored_layout
        self._workers = workers
        self._run = run
        self._folder = folder
        self._progress = progress
        self._target = PackTarget(folder=folder, codec=self._layout.codec, buffers=BufferPool(workers))

    def make(self, shard: ShardPlan, fingerprint: str, stop: threading.Event) -> ShardResult:
        return ShardPacker(self._run, self._target, self._progress, stop).pack(shard, fingerprint)

    def tidy(self, name: str) -> None:
        """Dumps stay: they are the run's."""

    def prepare(self, claim: Claim, todo: Sequence[Job]) -> None:
        done = self._names.difference(job.shard.name for job in todo)
        clear_old(self._folder, PackState(self._folder, self._layout), claim, keep=done)
        sizes = [job.shard.size_bytes for job in todo]
        check_space(self._folder, sum(sizes) + recoding_bytes(sizes, self._layout.codec, self._workers))

    @property
    def parts(self) -> Collection[Path]:
        return ()


def make_shard(work: Work, job: Job, stop: threading.Event) -> PackedShard:
    """Make one shard and write it down.

    Raises:
        StorageError: the disk is full or failed.
        StoppedError: `stop` was set.
    """
    result = work.maker.make(job.shard, job.fingerprint, stop)
    work.state.keep(job.shard.name, result.record, result.rows)
    work.maker.tidy(job.shard.name)
    return result.record


def _make_shards(work: Work, jobs: Sequence[Job], workers: int) -> dict[str, PackedShard]:
    """Make shards in worker threads."""
    work.folder.data.mkdir(parents=True, exist_ok=True)
    records = side_by_side(partial(make_shard, work), jobs, threads=workers, name="pack")
    return {job.shard.name: record for job, record in zip(jobs, records, strict=True)}


def _finish(folder: DatasetFolder, state: PackState, manifest: Manifest) -> None:
    """Write index and manifest; the manifest's name says that the dataset is whole."""
    folder.index.parent.mkdir(exist_ok=True)
    schema = index_schema(manifest.layers, is_coded=manifest.codec is not Codec.PLAIN)
    with staged(folder.index) as out:
        write_index(out, state.tables(entry.name for entry in manifest.shards), schema)
    write_record(folder.manifest, manifest)
    sync_folder(folder.root)


def plan_jobs(run: Run, plan: Plan) -> Iterator[Job]:
    """Yield each shard without the samples that the run has not, now."""
    absent = {*run.failed, *run.unfinished}
    for shard in plan.shards:
        gone = [placed.key for placed in shard.samples if placed.key in absent]
        yield shard_job(run, shard.without(gone) if gone else shard, plan.codec)


def shard_job(run: Run, shard: ShardPlan, codec: Codec) -> Job:
    """Return the job of a shard all of whose samples are finished."""
    return Job(shard=shard, fingerprint=_fingerprint(run, shard, codec))


def _fingerprint(run: Run, shard: ShardPlan, codec: Codec) -> str:
    """Return a hash over all that the shard's bytes depend on: format, run, prompts, samples, dumps, codec."""
    samples = []
    for placed in shard.samples:
        entry = run.entries[placed.key]
        dumps = [[dump.name, dump.size_bytes, dump.xxh3_128] for dump in entry.dumps]
        samples.append([placed.key, placed.sample.id, placed.sample.source, entry.num_tokens, entry.next_token, dumps])
    facts = [PACK_FORMAT, run.record.run_id, run.record.prompts.fingerprint, run.layout.layers, run.layout.hidden_size]
    coded = [] if codec is Codec.PLAIN else [codec]
    text = json.dumps([*facts, shard.number, shard.size_bytes, samples, *coded])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _manifest(run: Run, plan: Plan, shards: Mapping[str, PackedShard]) -> Manifest:
    record = run.record
    entries = tuple(shard.entry for shard in shards.values() if shard.entry is not None)
    num_tokens = sum(entry.num_tokens for entry in entries)
    sums: Counter[str] = Counter()
    for shard in shards.values():
        sums.update(shard.norm_sums)
    manifest = Manifest(
        run_id=record.run_id,
        created_at=record.created_at,
        eaglehs_version=record.eaglehs_version,
        model=record.model,
        layers=record.layers,
        prompts=record.prompts,
        engine=record.engine,
        shard_size_bytes=plan.shard_size_bytes,
        shuffle_seed=plan.shuffle_seed,
        failed=_failures(run, shards),
        state_norms={state: total / num_tokens for state, total in sums.items()},
        totals=Totals(
            num_samples=sum(entry.num_samples for entry in entries),
            num_tokens=num_tokens,
            num_trainable=sum(shard.num_trainable for shard in shards.values()),
            size_bytes=sum(entry.size_bytes for entry in entries),
        ),
        shards=entries,
        capture=record.capture,
        dtype=record.dtype,
        codec=plan.codec,
    )
    return published_manifest(manifest)


def _failures(run: Run, shards: Mapping[str, PackedShard]) -> dict[str, int]:
    refused = {item.key: item.reason for shard in shards.values() for item in shard.set_aside}
    failures = failures_by_class({**run.failed, **refused})
    unfinished = len(run.unfinished)
    return {**failures, NOT_EXTRACTED: unfinished} if unfinished else failures


def _summary(folder: DatasetFolder, plan: Plan, outcome: _Outcome) -> PackSummary:
    shards = outcome.shards.values()
    return PackSummary(
        dataset=str(folder.root),
        totals=outcome.manifest.totals,
        num_shards=len(outcome.manifest.shards),
        num_reused=outcome.num_reused,
        failed=outcome.manifest.failed,
        set_aside=tuple(item for shard in shards for item in shard.set_aside),
        warnings=(*plan_warnings(plan), *(warning for shard in shards for warning in shard.warnings)),
        is_unchanged=outcome.is_unchanged,
    )


def _check_has_dumps(run: Run) -> None:
    packing = run.record.packing
    if packing is not None:
        left = len(run.unfinished)
        state = f"{left} of {counted(len(run.prompts), 'sample')} are still to be done" if left else "it is finished"
        raise PackedAlreadyError(
            f"the run {run.folder.root} is packed already (extract --pack), into {packing.dataset}; {state}",
            why="Its dumps were freed as they went into the shards",
            mend="Finish it with the same `eaglehs extract` command" if left else f"Use {packing.dataset}",
        )


def _nothing(run: Run, failures: dict[str, int]) -> NothingToPackError:
    reasons = "; ".join(f"{count} x {reason}" for reason, count in failures.items())
    return NothingToPackError(
        f"0 of {counted(len(run.prompts), 'sample')} of {run.folder.root} can be packed",
        why=reasons or "None is extracted yet",
        mend=f"See {run.folder.ledger} for the reasons, and run `eaglehs extract` again",
    )
