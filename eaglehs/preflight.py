"""What an extraction will need, reckoned before the engine starts: bytes, shards, room in every folder, time.

tokens x bytes a token -> dumps or shards -> free space, a file system counted once -> refusal with both numbers
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .packing_keeper import PackOptions
from .schemas.counts import counted
from .schemas.errors import StorageError
from .schemas.ledger import LedgerEntry, SampleStatus
from .schemas.manifest import DatasetFolder
from .schemas.prompt import Prompt
from .schemas.sharding import Sharding
from .schemas.sizes import format_size
from .schemas.states import Codec

if TYPE_CHECKING:
    from .builder.plan import DatasetLayout, Plan

DRAINED_SHARDS = 3
"""Shards that must fit where finished ones are sent away: one that fills, one that is sent, one that waits."""


class NoRoomError(StorageError):
    """What an extraction will write does not fit."""

    def __init__(self, space: Space) -> None:
        """Both numbers, and the difference."""
        self.space = space
        super().__init__(
            f"{' and '.join(space.folders)} will need {_bytes(space.needed_bytes)}, "
            f"{_bytes(space.free_bytes)} are free there: {_bytes(space.needed_bytes - space.free_bytes)} are missing",
            mend="Free space, give folders on another disk, or take fewer prompts with --limit or shorter ones with "
            "--max-tokens; --pack needs the space once instead of twice",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """One file system that will be written to."""

    folders: tuple[str, ...]
    needed_bytes: int
    """What is still to be written there by this command."""

    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is still to be done, and whether there is room for it."""

    num_pending: int
    pending_tokens: int
    pending_bytes: int
    """Of rows: states, ids and masks."""

    dataset: str
    """Empty where the run is not packed while it is extracted."""

    num_shards: int
    dataset_bytes: int
    """Of all shards of the whole run, by the plan; with a codec, no more than that."""

    spool_bytes: int
    """Most bytes of dumps under way or waiting to be kept."""

    spaces: tuple[Space, ...]
    tokens_per_s: float | None
    """Measured by the last start of this run, or as given; None where neither is."""

    seconds: float | None
    warnings: tuple[str, ...]
    faults: tuple[str, ...]
    """What keeps the extraction from starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a forecast is made of."""

    prompts: Sequence[Prompt]
    entries: Mapping[str, LedgerEntry]
    """Of the run that is there; empty for a new one."""

    layout: DatasetLayout
    bytes_per_token: int
    run: Path
    dump_dirs: tuple[Path, ...]
    concurrency: int
    pack: PackOptions | None = None
    spool_bytes: int | None = None
    rate: float | None = None


def forecast(job: Job) -> Forecast:
    """Return what the extraction will need.

    Raises:
        UsageError: the shard size is too large.
        SampleTooLongError: a prompt is longer than a shard's member may hold.
    """
    from .builder.plan_warnings import plan_warnings

    plan = _plan(job)
    pending = [prompt for prompt in job.prompts if not _is_done(job.entries.get(prompt.key))]
    tokens = sum(prompt.num_tokens for prompt in pending)
    sizes = dump_sizes(job, pending)
    spool_bytes = _spool_bytes(job, sizes, _kept_bytes(job, plan, sizes))
    spaces = tuple(_spaces(_needs(job, plan, sizes, spool_bytes)))
    rate = job.rate or measured_rate(job.entries.values())
    return Forecast(
        num_pending=len(pending),
        pending_tokens=tokens,
        pending_bytes=tokens * job.bytes_per_token,
        dataset=str(job.pack.dataset) if job.pack else "",
        num_shards=len(plan.shards),
        dataset_bytes=plan.size_bytes,
        spool_bytes=spool_bytes,
        spaces=spaces,
        tokens_per_s=rate,
        seconds=tokens / rate if rate else None,
        warnings=tuple(plan_warnings(plan)),
        faults=tuple(str(fault) for fault in _faults(job, pending, spaces)) if pending else (),
    )


def check_room(job: Job, found: Forecast) -> None:
    """Refuse what can't fit.

    Raises:
        NoRoomError, SpoolTooSmallError: with the numbers.
    """
    pending = [prompt for prompt in job.prompts if not _is_done(job.entries.get(prompt.key))]
    for fault in _faults(job, pending, found.spaces) if pending else ():
        raise fault


def measured_rate(entries: Iterable[LedgerEntry]) -> float | None:
    """Return the tokens a second of the last start of a run, from its ledger; None where it does not tell."""
    from .extraction.run_store import TRIES_PER_START

    starts: dict[int, list[LedgerEntry]] = {}
    for entry in entries:
        if entry.status is SampleStatus.DONE and entry.finished_at:
            starts.setdefault(entry.attempt // TRIES_PER_START, []).append(entry)
    for start in sorted(starts, reverse=True):
        first, *rest = sorted(starts[start], key=lambda entry: entry.finished_at)
        seconds = rest[-1].finished_at - first.finished_at if rest else 0.0
        if seconds > 0:
            return sum(entry.num_tokens for entry in rest) / seconds
    return None


def dump_sizes(job: Job, prompts: Iterable[Prompt]) -> list[int]:
    """Return the most bytes that each prompt's dumps take."""
    from .extraction.spool import dump_bytes

    return [dump_bytes(prompt.num_tokens, job.bytes_per_token) for prompt in prompts]


def free_bytes(folder: Path) -> int:
    """Return the free space where `folder` is or will be."""
    return shutil.disk_usage(nearest_folder(folder)).free


def nearest_folder(folder: Path) -> Path:
    """Return `folder` or the closest folder above it that exists and can be seen by this user."""
    # os.path's answers no, where pathlib's raises, below a folder that can't be entered
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(path))  # noqa: PTH112


def _plan(job: Job) -> Plan:
    from .builder.plan import PlannedSample, plan_by

    planned = [PlannedSample(key=p.key, id=p.id, source=p.source, num_tokens=p.num_tokens) for p in job.prompts]
    return plan_by(job.pack or Sharding(), planned, job.layout)


def _is_done(entry: LedgerEntry | None) -> bool:
    return entry is not None and entry.status is SampleStatus.DONE


def _kept_bytes(job: Job, plan: Plan, sizes: Sequence[int]) -> int:
    """Return what is still to be written to where samples stay: shards, or dumps in the run."""
    if job.pack is None:
        return sum(sizes)
    from .builder.pack_folder import recoding_bytes
    from .builder.pushed_shards import PushedShards
    from .builder.worker_count import worker_count

    folder = DatasetFolder(job.pack.dataset)
    pushed = PushedShards(folder)
    kept_bytes = 0
    sizes = []
    for shard in plan.shards:
        there_bytes = _there_bytes(folder.shard(shard.name))
        is_elsewhere = not there_bytes and pushed.note(shard.name) is not None
        is_coded = job.pack.codec is not Codec.PLAIN and folder.shard(shard.name).exists()
        if not is_elsewhere and not is_coded:
            kept_bytes += shard.size_bytes - there_bytes
            sizes.append(shard.size_bytes)
    largest = max((shard.size_bytes for shard in plan.shards), default=0)
    kept_bytes = min(kept_bytes, DRAINED_SHARDS * largest) if job.pack.is_drained else kept_bytes
    return kept_bytes + recoding_bytes(sizes, job.pack.codec, worker_count(None))


def _there_bytes(shard: Path) -> int:
    """Return what of a shard is on the disk already."""
    from .builder.shard_parts import part_of

    if shard.exists():
        return shard.stat().st_size
    try:
        part = part_of(shard).stat()
    except OSError:
        return 0
    return min(part.st_blocks * 512, part.st_size)  # sparse: what is unwritten takes no room yet


def _spool_bytes(job: Job, sizes: Sequence[int], kept_bytes: int) -> int:
    """Return the bound of the spool: as given, or from the free space, less what the samples themselves will need."""
    from .extraction.spool import default_spool_bytes

    if job.spool_bytes is not None:
        return job.spool_bytes
    free = min(free_bytes(folder) for folder in job.dump_dirs)
    bound = default_spool_bytes(sizes, job.concurrency, free)
    if job.pack is not None and any(_device(folder) == _device(job.pack.dataset) for folder in job.dump_dirs):
        bound = min(bound, max(free - kept_bytes, max(sizes, default=0)))
    return bound


def _needs(job: Job, plan: Plan, sizes: Sequence[int], spool_bytes: int) -> dict[Path, int]:
    """Return folder -> bytes that will be written to it."""
    kept = job.run if job.pack is None else job.pack.dataset
    needs = {job.run: 0, kept: _kept_bytes(job, plan, sizes)}
    most = min(max(spool_bytes, max(sizes, default=0)), sum(sizes))
    spooled: set[int] = set()  # the bound is one for the dump folders of all servers together
    if job.pack is None:
        spooled.add(_device(kept))  # a dump is renamed into the run: the same bytes
    for folder in job.dump_dirs:
        device = _device(folder)
        needs[folder] = needs.get(folder, 0) + (0 if device in spooled else most)
        spooled.add(device)
    return needs


def _spaces(needs: Mapping[Path, int]) -> Iterable[Space]:
    by_device: dict[int, list[Path]] = {}
    for folder in needs:
        by_device.setdefault(_device(folder), []).append(folder)
    for folders in by_device.values():
        yield Space(
            folders=tuple(str(folder) for folder in folders),
            needed_bytes=sum(needs[folder] for folder in folders),
            free_bytes=free_bytes(folders[0]),
        )


def _faults(job: Job, pending: Sequence[Prompt], spaces: Iterable[Space]) -> Iterable[StorageError]:
    from .extraction.spool import SpoolTooSmallError

    size, key = max(zip(dump_sizes(job, pending), (prompt.key for prompt in pending), strict=True))
    for folder in job.dump_dirs:
        if size > free_bytes(folder):
            yield SpoolTooSmallError(key, size, free_bytes(folder), folder)
    for space in spaces:
        if space.needed_bytes > space.free_bytes:
            yield NoRoomError(space)


def _device(folder: Path) -> int:
    return nearest_folder(folder).stat().st_dev


def _bytes(count: int) -> str:
    return f"{counted(count, 'byte')} ({format_size(count)})"
