"""Checks a run or a dataset from its files alone; every fault is named, none stops the work.

verify_run        run.json, prompts, ledger; each finished sample's dumps            builder/run_check
                  or its place in a shard, where it was packed at once               builder/packed_check
verify_dataset    manifest, index, files on disk; each shard in one pass             builder/verify_shard
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from ..schemas.codec import read_record
from ..schemas.counts import counted
from ..schemas.errors import RecordError, UsageError
from ..schemas.folders import no_folder
from ..schemas.index import IndexRow
from ..schemas.keys import is_key
from ..schemas.ledger import SampleStatus
from ..schemas.manifest import MANIFEST_FILENAME, DatasetFolder, Manifest
from ..schemas.progress import Progress, Silent
from ..schemas.run import RUN_FILENAME
from .faults import Findings, VerifyReport
from .index_store import read_index
from .preview import preview_faults
from .pushed_shards import PushedShards
from .run_reader import NoRunError, Run, open_run
from .verify_shard import ShardTask, ShardVerifier


def verify(path: Path, progress: Progress, *, workers: int = 1, quick: bool = False) -> VerifyReport:
    """Verify what is at `path`, a run or a dataset; `quick` is for datasets.

    Raises:
        UsageError: it is neither, or a run and `quick`.
    """
    if (path / RUN_FILENAME).exists():
        if quick:
            raise UsageError(f"{path} is a run, of which all is checked", mend="Leave --quick out")
        return verify_run(path, progress)
    folder = DatasetFolder(path)
    if folder.manifest.exists() or folder.data.is_dir():
        return verify_dataset(path, progress, workers=workers, quick=quick)
    what = f"{path} is neither a run nor a dataset" if path.is_dir() else no_folder(path)
    raise UsageError(
        what, why=f"A run has {RUN_FILENAME}, a dataset {MANIFEST_FILENAME}", mend="Give one of their folders"
    )


def verify_run(path: Path, progress: Progress | None = None) -> VerifyReport:
    """Check every finished sample of a run; samples that failed or are still to be done are no faults.

    Raises:
        NoRunError: there is no run.
    """
    findings = Findings(path)
    try:
        with open_run(path) as run:
            _check_samples(run, findings, progress or Silent())
            _check_packed_samples(run, findings, progress or Silent())
            _check_dump_folder(run, findings)
    except NoRunError:
        raise
    except RecordError as fault:
        findings.add(Path(fault.where).name, str(fault))
    return findings.report("run")


def verify_dataset(
    path: Path, progress: Progress | None = None, *, workers: int = 1, quick: bool = False
) -> VerifyReport:
    """Check every file and every value of a dataset; in memory are the index and a block of each shard under way.

    `quick` reads no array: sizes, headers, `meta.json` and index are held against one another, seconds for a terabyte.
    """
    folder = DatasetFolder(path)
    findings = Findings(path)
    try:
        manifest = read_record(Manifest, folder.manifest)
    except RecordError as fault:
        mend = "" if fault.mend else " Copy it here again, or pack again."
        findings.add(MANIFEST_FILENAME, f"{fault} Without it nothing else can be checked.{mend}")
        return findings.report("dataset")
    _check_manifest(manifest, findings)
    _check_files(folder, manifest, findings)
    for name, message in preview_faults(path, manifest):
        findings.add(name, message)
    tasks = [task for task in _tasks(folder, manifest, findings) if not _is_remote(folder, task, findings)]
    workers = 1 if quick else workers  # heads are Python's work: two threads took turns and twice as long
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify") as pool:

        def verify_one(task: ShardTask) -> Findings:
            return ShardVerifier(path, manifest, task).verify(progress or Silent(), quick=quick)

        for part in pool.map(verify_one, tasks):
            findings.merge(part)
    return findings.report("dataset")


def _is_remote(folder: DatasetFolder, task: ShardTask, findings: Findings) -> bool:
    """Tell whether the shard is on the Hub alone; the index must have its samples all the same."""
    pushed = PushedShards(folder)
    note = pushed.only_remote(task.entry)
    if note is None:
        return False
    findings.only_remote.append(pushed.place(note))
    if task.rows is not None and len(task.rows) != task.entry.num_samples:
        index = str(folder.index.relative_to(folder.root))
        findings.add(
            index,
            f"has {counted(len(task.rows), 'sample')} of {note.name}, manifest.json has {task.entry.num_samples:,}",
        )
    return True


def _check_samples(run: Run, findings: Findings, progress: Progress) -> None:
    from .run_check import examine_finished  # brings torch, 180 MB that a dataset is checked without

    for entry in run.entries.values():
        if entry.status is not SampleStatus.DONE or entry.shard:
            continue
        findings.num_samples += 1
        findings.num_tokens += entry.num_tokens
        findings.num_files += len(entry.dumps)
        size_bytes = sum(dump.size_bytes for dump in entry.dumps)
        findings.size_bytes += size_bytes
        first = [*run.dump_paths(entry.key), run.folder.ledger][0]
        with findings.noting(str(first.relative_to(run.folder.root)), key=entry.key):
            examine_finished(run, run.prompts.prompt(entry.key))
        progress.advance(num_samples=1, num_tokens=entry.num_tokens, size_bytes=size_bytes)


def _check_packed_samples(run: Run, findings: Findings, progress: Progress) -> None:
    """Check the samples that went straight into the shards of a dataset: their dumps are gone on purpose."""
    if run.record.packing is None:
        return
    from .packed_check import PackedSamples, check_packed  # brings torch as well

    pushed = PushedShards(DatasetFolder(Path(run.record.packing.dataset)))
    for path, samples in PackedSamples(run, run.record.packing).by_shard():
        note = None if path.exists() else pushed.note(f"data/{path.name}")
        if note is not None:
            findings.only_remote.append(pushed.place(note))
            continue
        findings.num_files += 1
        for entry, row in samples:
            size_bytes = row.array_bytes if row else 0
            findings.num_samples += 1
            findings.num_tokens += entry.num_tokens
            findings.size_bytes += size_bytes
            with findings.noting(str(path), key=entry.key):
                check_packed(path, entry, row)
            progress.advance(num_samples=1, num_tokens=entry.num_tokens, size_bytes=size_bytes)


def _check_dump_folder(run: Run, findings: Findings) -> None:
    owned = {path for key, entry in run.entries.items() if not entry.shard for path in run.dump_paths(key)}
    for path in sorted((run.folder.root / "dumps").glob("*/*")):
        if path not in owned:
            what = "an unfinished file of a killed run" if path.suffix == ".part" else "no ledger line names it"
            findings.add(str(path.relative_to(run.folder.root)), f"{what}; the next `eaglehs extract` removes it")


def _check_manifest(manifest: Manifest, findings: Findings) -> None:
    totals = manifest.totals
    for what, said, summed in (
        ("sample", totals.num_samples, sum(shard.num_samples for shard in manifest.shards)),
        ("token", totals.num_tokens, sum(shard.num_tokens for shard in manifest.shards)),
        ("byte", totals.size_bytes, sum(shard.size_bytes for shard in manifest.shards)),
    ):
        if said != summed:
            findings.add(MANIFEST_FILENAME, f"says {counted(said, what)} in all, its shards have {summed:,}")
    names = [shard.name for shard in manifest.shards]
    if not names:
        findings.add(MANIFEST_FILENAME, "lists no shard")
    for name in sorted({name for name in names if names.count(name) > 1}):
        findings.add(MANIFEST_FILENAME, f"lists {name} twice")


def _check_files(folder: DatasetFolder, manifest: Manifest, findings: Findings) -> None:
    listed = {shard.name for shard in manifest.shards}
    for path in sorted(folder.data.iterdir()) if folder.data.is_dir() else []:
        name = f"data/{path.name}"
        if path.name.startswith("."):
            findings.add(name, "an unfinished file of a killed pack; the next `eaglehs pack` removes it")
        elif name not in listed:
            findings.add(name, "is not in manifest.json; stock readers would take it for part of the dataset")
    for path in sorted(folder.root.glob("*.py")):
        findings.add(path.name, "a Python file at the root: `datasets` may refuse the whole repository for it")


def _tasks(folder: DatasetFolder, manifest: Manifest, findings: Findings) -> Iterator[ShardTask]:
    """Pair each shard of the manifest with its rows of the index, as far as that can be read."""
    index = str(folder.index.relative_to(folder.root))
    waiting = {shard.name: shard for shard in manifest.shards}
    num_before = len(findings.faults)
    rows_by_shard: dict[str, tuple[IndexRow, ...]] = {}
    seen: dict[str, str] = {}
    with findings.noting(index):
        for name, group in groupby(read_index(folder.index), key=lambda row: row.shard):
            rows = tuple(group)
            _check_keys(rows, seen, findings, index)
            if name in rows_by_shard:
                findings.add(index, f"the rows of {name} stand in two places")
            elif name not in waiting:
                findings.add(index, f"has {counted(len(rows), 'sample')} of {name}, which manifest.json does not list")
            rows_by_shard[name] = rows_by_shard.get(name, ()) + rows
    is_readable = len(findings.faults) == num_before or bool(rows_by_shard)
    for name, entry in waiting.items():
        yield ShardTask(entry=entry, rows=rows_by_shard.pop(name, ()) if is_readable else None)


def _check_keys(rows: tuple[IndexRow, ...], seen: dict[str, str], findings: Findings, index: str) -> None:
    for row in rows:
        if not is_key(row.key):
            findings.add(index, f"{row.key[:80]!r} is not a key", key=row.key[:80])
        if row.key in seen:
            findings.add(index, f"is in {seen[row.key]} and in {row.shard}: it would be trained on twice", key=row.key)
        seen[row.key] = row.shard
