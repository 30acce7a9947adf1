"""Packs samples while they are extracted: each one straight to its planned place, on disk before the ledger names it.

    OneStep(run, dataset, settings)   the same plan as `pack`: all prompts of the run over shards
      .open()      claim the folder; which finished samples are in it          builder/shard_parts
      .write()     a checked sample to its place, synced, read back            builder/shard_packer, tar_writer
      .kept()      its ledger line is on disk: seal the shard if it is whole   builder/shard_seal
      .finish()    shards without what failed, index, manifest                 builder/pack

Order of a sample: bytes in the part synced, ledger line synced, dumps freed. A kill between any two leaves bytes that
no ledger line names; they are written over by the sample's next attempt.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..schemas.atomic import sync_folder
from ..schemas.counts import counted
from ..schemas.errors import StorageError
from ..schemas.ledger import LedgerEntry
from ..schemas.manifest import DatasetFolder, ShardEntry
from ..schemas.progress import Progress
from ..schemas.prompt import Prompt
from ..schemas.run import RunRecord
from ..schemas.sample import CheckedSample
from ..schemas.sharding import Sharding
from .dump_reader import read_dump
from .pack import Job, PackSummary, Work, make_shard, pack_shards, plan_jobs, plan_run, shard_job
from .pack_folder import open_folder
from .plan import PlacedSample, ShardPlan
from .run_reader import Run
from .shard_packer import bloated, sample_meta, write_sample
from .shard_parts import ShardParts, check_written
from .shard_seal import ShardSealer
from .tar_writer import ShardWriter


class OneStep:
    """One run on its way into one dataset folder, whose lock the caller holds. Any thread may write and keep."""

    def __init__(self, run: Run, dataset: Path, sharding: Sharding, progress: Progress, *, workers: int) -> None:
        """`run.entries` is the ledger as it grows, shared with whoever appends to it."""
        plan = plan_run(run, sharding)
        self.folder = self._folder = DatasetFolder(dataset)
        self.shard_names = frozenset(shard.name for shard in plan.shards)
        self._parts = ShardParts(self._folder, sharding.codec)
        self._work = Work(run, plan, self._folder, ShardSealer(run, plan, self._folder, self._parts), progress)
        self._workers = workers
        self._places: dict[str, tuple[ShardPlan, PlacedSample]] = {
            placed.key: (shard, placed) for shard in plan.shards for placed in shard.samples
        }
        self._missing: dict[str, set[str]] = {}
        self.whole: list[ShardEntry] = []
        """Finished shards with all their samples, as `open` and `seal_filled` found them."""

        self._lock = threading.Lock()
        self._sealing = threading.Semaphore(workers)
        """Room is reckoned for so many shards that are recoded at once."""

    def open(self) -> frozenset[str]:
        """Claim the folder and return the keys of finished samples that its shards hold.

        Raises:
            ForeignFolderError: the folder holds what is not this run's.
        """
        run, plan, state = self._work.run, self._work.plan, self._work.state
        claim_parts = self._work.maker.parts
        open_folder(self._folder, state, run.record.run_id, [shard.name for shard in plan.shards], claim_parts)
        held: set[str] = set()
        for shard, job in zip(plan.shards, plan_jobs(run, plan), strict=True):
            keys = {placed.key for placed in job.shard.samples if self._entry(placed.key).shard == shard.name}
            record = state.finished(shard.name, job.fingerprint) if len(keys) == len(job.shard.samples) else None
            if keys and record:
                self._work.maker.tidy(shard.name)  # left by a kill after the record, or by nothing
                self.whole += [record.entry] if record.entry and len(keys) == len(shard.samples) else []
            elif keys:
                keys = self._parts.take_up(shard, keys)
            self._missing[shard.name] = {placed.key for placed in shard.samples}.difference(keys)
            held |= keys
        return frozenset(held)

    def seal_filled(self) -> None:
        """Seal the shards that `open` found filled but not sealed: the command was killed in between.

        Raises:
            StorageError: a shard can't be read back or renamed.
        """
        sealed = {entry.name for entry in self.whole}
        for shard in self._work.plan.shards:
            if not self._missing[shard.name] and shard.name not in sealed:
                entry = make_shard(self._work, self._job(shard), threading.Event()).entry
                self.whole += [entry] if entry else []

    def begin(self) -> None:
        """Take the dataset's manifest and index away: more samples come.

        Raises:
            StorageError: the folder can't be written.
        """
        try:
            for path in (self._folder.manifest, self._folder.index):
                path.unlink(missing_ok=True)
            self._folder.data.mkdir(exist_ok=True)
            sync_folder(self._folder.root)
        except OSError as fault:
            raise StorageError(f"the dataset folder {self._folder.root} can't be written: {fault.strerror}") from None

    def write(self, prompt: Prompt, checked: CheckedSample, dumps: Sequence[Path], next_token: int) -> str:
        """Write a checked sample to its place and return its shard; the bytes are on disk then.

        Raises:
            DataError: a dump changed after it was checked.
            StorageError: the disk is full or failed.
        """
        shard, placed = self._places[prompt.key]
        try:
            with self._parts.opened(shard) as part:
                self._work.state.forget(shard.name)
                opened = sorted((read_dump(path, shard.layout) for path in dumps), key=lambda dump: dump.name.start)
                meta = sample_meta(placed, prompt, checked.xxh3_128, next_token)
                write_sample(ShardWriter(part, shard), placed, meta, prompt, opened)
                os.fdatasync(part.fileno())
                check_written(Path(part.name), part.fileno(), placed, checked.xxh3_128)
        except OSError as fault:
            free = shutil.disk_usage(self._folder.root).free
            raise StorageError(
                f"sample {prompt.key} ({counted(placed.end - placed.start, 'byte')}) can't be written to {shard.name} "
                f"in {self._folder.root}: {fault.strerror or fault}",
                why=f"{counted(free, 'byte is', 'bytes are')} free there",
                mend="Free space and run the same command again: finished samples are kept",
            ) from None
        for warning in bloated(opened):
            self._work.progress.note(f"warning: {warning}")
        return shard.name

    def kept(self, key: str) -> ShardEntry | None:
        """Take note that the ledger names the sample; the last one of a shard seals it, and the shard is returned.

        Raises:
            StorageError: the shard can't be read back or renamed.
        """
        shard, _ = self._places[key]
        with self._lock:
            missing = self._missing[shard.name]
            missing.discard(key)
            is_whole = not missing
        if not is_whole:
            return None
        with self._sealing:
            return make_shard(self._work, self._job(shard), threading.Event()).entry

    def finish(self, record: RunRecord) -> PackSummary:
        """Make the shards that are left, index and manifest; `record` is run.json as it now is.

        Raises:
            NothingToPackError: no sample is finished.
            StorageError: the disk is full or failed.
        """
        run = replace(self._work.run, record=record)
        return pack_shards(replace(self._work, run=run), workers=self._workers)

    def _entry(self, key: str) -> LedgerEntry:
        return self._work.run.entries[key]

    def _job(self, shard: ShardPlan) -> Job:
        return shard_job(self._work.run, shard, self._work.plan.codec)
