"""Run to dataset.

    open_run          prompts, ledger                                          builder/run_reader
      -> plan_run     all prompts of the run over shards, in order             builder/plan
      -> claim        lock the folder; what is finished, foreign or left over  builder/pack_state
      -> shards       by worker threads; each renamed and recorded when whole  builder/shard_packer
      -> finish       index, then manifest, by rename

The plan is made over all prompts, done or not: a sample that is missing is taken out of its own shard, and the other
shards are the same bytes as if it were there. So they stay when a later run has finished it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ..schemas.atomic import staged, sync_folder
from ..schemas.codec import write_record
from ..schemas.errors import DataError
from ..schemas.manifest import DatasetFolder, Manifest, Totals
from ..schemas.progress import Progress
from .index_store import index_schema, write_index
from .pack_folder import check_space, clear_old, drop_if_empty, is_finished, open_folder
from .pack_state import PackedShard, PackState, SetAside, locked
from .plan import Plan, ShardPlan, plan_dataset
from .run_reader import Run, failures_by_class, open_run
from .shard_packer import PackStoppedError, ShardPacker

PACK_FORMAT = 1
"""Raised when the same run and settings would pack to other bytes."""

NOT_EXTRACTED = "not extracted yet"


class NothingToPackError(DataError):
    """No sample of the run can be packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """How to pack; all but `workers` decide the bytes."""

    shard_size_bytes: int = 2_000_000_000
    workers: int = 1
    shuffle_seed: int | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
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
    with open_run(run) as source:
        if not settings.allow_partial:
            source.check_finished()
        if source.num_done == 0:
            raise _nothing(source, failures_by_class(source.failed))
        plan = plan_run(source, settings)
        folder = DatasetFolder(dataset)
        existed = dataset.exists()
        with locked(dataset):
            try:
                return _pack(source, plan, folder, settings, progress)
            except BaseException:
                drop_if_empty(folder, existed=existed)
                raise


def plan_run(run: Run, settings: PackSettings) -> Plan:
    """Return the plan of all prompts of a run."""
    return plan_dataset(
        run.prompts.planned(),
        run.layout,
        shard_size_bytes=settings.shard_size_bytes,
        shuffle_seed=settings.shuffle_seed,
    )


def _pack(run: Run, plan: Plan, folder: DatasetFolder, settings: PackSettings, progress: Progress) -> PackSummary:
    state = PackState(folder, run.layout)
    jobs = list(_jobs(run, plan))
    claim = open_folder(folder, state, run.record.run_id, [job.shard.name for job in jobs])
    done = {job.shard.name: state.finished(job.shard.name, job.fingerprint) for job in jobs}
    shards = {name: record for name, record in done.items() if record is not None and not record.set_aside}
    todo = [job for job in jobs if job.shard.name not in shards]
    num_reused = len(shards)
    if not todo:
        manifest = _manifest(run, plan, shards)
        if is_finished(folder, manifest):
            return _summary(folder, plan, _Outcome(manifest, shards, num_reused, is_unchanged=True))
    for warning in plan.warnings():
        progress.note(f"warning: {warning}")
    clear_old(folder, state, claim, keep=set(shards))
    check_space(folder, sum(job.shard.size_bytes for job in todo))
    shards |= _pack_shards(_Work(run, folder, state, progress), todo, settings.workers)
    ordered = {job.shard.name: shards[job.shard.name] for job in jobs}
    manifest = _manifest(run, plan, ordered)
    if manifest.totals.num_samples == 0:
        raise _nothing(run, manifest.failed)
    _finish(folder, state, manifest)
    return _summary(folder, plan, _Outcome(manifest, ordered, num_reused, is_unchanged=False))


@dataclass(frozen=True, slots=True)
class _Work:
    run: Run
    folder: DatasetFolder
    state: PackState
    progress: Progress


def _pack_shards(work: _Work, jobs: Sequence[_Job], workers: int) -> dict[str, PackedShard]:
    """Pack shards in worker threads; copies, hashes and reads let go of the GIL."""
    work.folder.data.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def pack_one(job: _Job) -> PackedShard:
        if stop.is_set():
            raise PackStoppedError
        result = ShardPacker(work.run, work.folder, work.progress, stop).pack(job.shard, job.fingerprint)
        work.state.keep(job.shard.name, result.record, result.rows)
        return result.record

    packed = {}
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="pack") as pool:
        futures = {pool.submit(pack_one, job): job.shard.name for job in jobs}
        try:
            for future in as_completed(futures):
                packed[futures[future]] = future.result()
        except BaseException:  # also Ctrl-C: no shard is begun any more, those under way end at the next sample
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return packed


def _finish(folder: DatasetFolder, state: PackState, manifest: Manifest) -> None:
    """Write index and manifest; the manifest's name says that the dataset is whole."""
    folder.index.parent.mkdir(exist_ok=True)
    schema = index_schema(manifest.layers)
    with staged(folder.index) as out:
        write_index(out, state.tables(entry.name for entry in manifest.shards), schema)
    write_record(folder.manifest, manifest)
    sync_folder(folder.root)


def _jobs(run: Run, plan: Plan) -> Iterator[_Job]:
    absent = {*run.failed, *run.unfinished}
    for shard in plan.shards:
        kept = shard.without(absent) if any(placed.key in absent for placed in shard.samples) else shard
        yield _Job(shard=kept, fingerprint=_fingerprint(run, kept))


def _fingerprint(run: Run, shard: ShardPlan) -> str:
    """Return a hash over all that the shard's bytes depend on: format, run, prompts, samples, dumps."""
    samples = []
    for placed in shard.samples:
        entry = run.entries[placed.key]
        dumps = [[dump.name, dump.size_bytes, dump.xxh3_128] for dump in entry.dumps]
        samples.append([placed.key, placed.sample.id, placed.sample.source, entry.num_tokens, entry.next_token, dumps])
    facts = [PACK_FORMAT, run.record.run_id, run.record.prompts.fingerprint, run.layout.layers, run.layout.hidden_size]
    text = json.dumps([*facts, shard.number, shard.size_bytes, samples])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _manifest(run: Run, plan: Plan, shards: Mapping[str, PackedShard]) -> Manifest:
    record = run.record
    entries = tuple(shard.entry for shard in shards.values() if shard.entry is not None)
    num_tokens = sum(entry.num_tokens for entry in entries)
    sums: Counter[str] = Counter()
    for shard in shards.values():
        sums.update(shard.norm_sums)
    return Manifest(
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
    )


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
        warnings=(*plan.warnings(), *(warning for shard in shards for warning in shard.warnings)),
        is_unchanged=outcome.is_unchanged,
    )


def _nothing(run: Run, failures: dict[str, int]) -> NothingToPackError:
    reasons = "; ".join(f"{count} x {reason}" for reason, count in failures.items())
    return NothingToPackError(
        f"none of the {len(run.prompts)} samples of {run.folder.root} can be packed",
        why=reasons or "None is extracted yet",
        mend=f"See {run.folder.ledger} for the reasons, and run `eaglehs extract` again",
    )
