"""One kill and what comes after it: the same command again, and all that must hold then.

start -> wait for the moment -> signal -> look at what is finished -> the same command again -> pack -> faults
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from eaglehs.builder.index_store import read_index
from eaglehs.builder.stream import stream
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.ledger import LedgerEntry, SampleStatus, read_ledger
from eaglehs.schemas.manifest import Manifest

from . import client
from .cases import NUM_PROMPTS, ONE_STEP, Case, Victim
from .processes import Process, below, kill, title_of, wait_until_gone

HEAD = ("case", "mode", "at once", "server", "victim", "moment", "finished before", "recomputed", "seconds", "verdict")
SHARD_SIZE = "500KB"
NOISE = 0.05
"""Relative error of a row, median over a sample's, that another batch may make; another layer makes it ten times."""

_INTERRUPTED = 130
_STALL_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What all cases share."""

    model: Path
    prompts: Path
    folder: Path
    engine: tuple[str, ...]
    """Options of an extraction with an engine of its own."""

    attached: tuple[str, ...] = ()
    """Options of one that uses the server that is kept up."""

    sglang_args: tuple[str, ...] = ()
    layers: tuple[int, ...] = (1, 4, 6)
    environment: Mapping[str, str] = field(default_factory=dict)

    def extract(self, case: Case) -> tuple[object, ...]:
        """Return the command of a case, without the program's name."""
        options = self.engine if case.has_own_server else self.attached
        pack = ("--pack", "dataset", "--shard-size", SHARD_SIZE) if case.mode == ONE_STEP else ()
        command = (
            "extract",
            "--model",
            self.model,
            "--prompts",
            self.prompts,
            "--layers",
            ",".join(map(str, self.layers)),
            *options,
            *pack,
        )
        if "transformers" in options:
            return command
        own = ("--", *self.sglang_args) if case.has_own_server and self.sglang_args else ()
        return (*command, "--concurrency", case.concurrency, "--stall-timeout", _STALL_TIMEOUT_S, *own)


@dataclass(frozen=True)
class Unbroken:
    """The dataset of an extraction that nothing disturbed, one request at a time."""

    folder: Path

    @cached_property
    def shards(self) -> Mapping[str, str]:
        """Name -> SHA-256."""
        return shards_of(self.folder / "dataset")

    @cached_property
    def samples(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """Key -> tensors."""
        return {sample["key"]: sample for sample in stream(self.folder / "dataset")}


def make_unbroken(rig: Rig, case: Case, folder: Path) -> Unbroken:
    """Run the command of `case` to its end."""
    folder.mkdir(parents=True)
    assert client.run(*rig.extract(case), cwd=folder, environment=rig.environment) == 0, (
        folder / "out.txt"
    ).read_text()
    pack(case, folder)
    return Unbroken(folder)


def run_case(rig: Rig, case: Case, unbroken: Unbroken) -> tuple[object, ...]:
    """Kill one extraction, go on with it, and return its row of the report."""
    started = time.monotonic()
    folder = rig.folder / f"{case.mode}-{case.number}"
    folder.mkdir()
    faults = list(strike(rig, case, folder))
    before = ledger_of(folder)
    saved = save(folder)
    code = client.run(*rig.extract(case), cwd=folder, environment=rig.environment)
    if code:
        faults.append(f"the second start ended with {code}")
    else:
        pack(case, folder)
        faults += check(folder, unbroken, case, before, saved)
        faults += left_in_spool(rig, case)
    if recomputed := num_recomputed(folder, before):
        faults.append(f"{recomputed} finished samples were computed again")
    if not faults:
        shutil.rmtree(folder)
    seconds = f"{time.monotonic() - started:.0f}"
    server = "own" if case.has_own_server else "kept"
    verdict = "; ".join(faults) or "ok"
    done = len(finished(before))
    return (
        case.number,
        case.mode,
        case.concurrency,
        server,
        case.victim,
        case.moment,
        done,
        recomputed,
        seconds,
        verdict,
    )


def strike(rig: Rig, case: Case, folder: Path) -> Iterator[str]:
    """Start the extraction, end the victim at its moment, and wait until all of it is gone; yield what is wrong."""
    command = client.start(*rig.extract(case), cwd=folder, environment=rig.environment)
    is_there = command.wait_until(lambda: num_lines(folder) >= case.num_finished)
    time.sleep(case.delay_s)
    family: list[Process] = below(command.pid)
    hit(case.victim, command.pid, family)
    family = list({*family, *below(command.pid)})
    code = command.wait()
    wanted = {
        Victim.CLIENT: {-9},
        Victim.ALL: {-9},
        Victim.TERM: {_INTERRUPTED, -15},
        Victim.CTRL_C: {_INTERRUPTED, -2},
        Victim.CTRL_C_TWICE: {_INTERRUPTED, -2},
    }.get(case.victim, {0})  # a server that dies is started again
    is_nearly_done = case.num_finished > NUM_PROMPTS // 2  # the run may end before it hears of the signal
    if is_there and code not in wanted | ({0} if is_nearly_done else set()):
        yield f"the first start ended with {code}"
    if "Traceback" in command.output.read_text():
        yield "a traceback was printed"
    if left := wait_until_gone(family):
        yield f"processes are left: {left}"


def hit(victim: Victim, client_pid: int, family: list[Process]) -> None:
    """Send the signals. `family` is guard, SGLang, its children, in this order."""
    pids = [process[0] for process in family]
    killed = {
        Victim.CLIENT: [client_pid],
        Victim.SERVER: pids[1:2],
        Victim.SCHEDULER: [pid for pid in pids if "scheduler" in title_of(pid)],
        Victim.ALL: [client_pid, *pids],
    }
    signalled = {
        Victim.TERM: [signal.SIGTERM],
        Victim.CTRL_C: [signal.SIGINT],
        Victim.CTRL_C_TWICE: [signal.SIGINT, signal.SIGINT],
    }
    for pid in killed.get(victim, ()):
        kill(pid)
    for number in signalled.get(victim, ()):
        kill(client_pid, number)
        time.sleep(0.02)


def check(folder: Path, unbroken: Unbroken, case: Case, before: list[LedgerEntry], saved: Path) -> Iterator[str]:
    """Yield what does not hold of the finished run and dataset."""
    now = ledger_of(folder)
    if now[: len(before)] != before:
        yield "ledger lines of the first start have changed"
    if len(finished(now)) != NUM_PROMPTS:
        yield f"{len(finished(now))} of {NUM_PROMPTS} samples are finished"
    if parts := [path for path in folder.rglob("*.part") if saved not in path.parents]:
        yield f"parts are left: {parts}"
    for what in ("dataset",) if case.mode == ONE_STEP else ("run", "dataset"):
        if client.run("verify", what, cwd=folder):
            yield f"{what} does not verify"
    if case.concurrency == 1 and shards_of(folder / "dataset") != unbroken.shards:
        yield "shards differ from the unbroken run's"
    yield from unlike(folder, unbroken)
    yield from changed(folder, case, finished(before), saved)


def left_in_spool(rig: Rig, case: Case) -> Iterator[str]:
    """Yield what dumps are still in the dump folder, whole or half-written."""
    options = rig.engine if case.has_own_server else rig.attached
    spool = Path(options[options.index("--dump-dir") + 1]) if "--dump-dir" in options else None
    names = [path.name for path in spool.iterdir()] if spool and spool.is_dir() else []
    if left := [name for name in names if name.startswith(("eh-", ".eh-"))]:
        yield f"dumps are left: {left}"


def unlike(folder: Path, unbroken: Unbroken) -> Iterator[str]:
    """Yield samples that are further from the unbroken run's than another batch explains."""
    samples = {sample["key"]: sample for sample in stream(folder / "dataset")}
    if samples.keys() != unbroken.samples.keys():
        yield f"samples {sorted(samples.keys() ^ unbroken.samples.keys())} are in one dataset only"
        return
    for key, sample in samples.items():
        other = unbroken.samples[key]
        for name in ("input_ids", "loss_mask"):
            if not torch.equal(sample[name], other[name]):
                yield f"{key}: {name} differ"
        for name in (name for name in other if name == "final" or name.startswith("layer_")):
            mine, theirs = sample[name].float(), other[name].float()
            error = ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).median().item()
            if error > NOISE:
                yield f"{key}: {name} is {error:.3f} off"


def changed(folder: Path, case: Case, done: set[str], saved: Path) -> Iterator[str]:
    """Yield samples that were finished before the kill and have other bytes now."""
    if case.mode != ONE_STEP:
        for path in (saved / "run" / "dumps").glob("*/*.pt"):
            now = folder / path.relative_to(saved)
            if path.name.split("-")[2] in done and (not now.exists() or now.read_bytes() != path.read_bytes()):
                yield f"{path.name} has changed"
        return
    for row in read_index(folder / "dataset" / "_index" / "samples.parquet"):
        if row.key not in done:
            continue
        final = folder / "dataset" / row.shard
        (old,) = [
            path for path in (saved / row.shard, (saved / row.shard).with_name(f".{final.name}.part")) if path.exists()
        ]
        for name, place in row.arrays.items():
            if _slice(old, place.offset, place.length) != _slice(final, place.offset, place.length):
                yield f"{row.key}: {name} has changed"


def _slice(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def save(folder: Path) -> Path:
    """Copy what the kill left, to be compared with later."""
    saved = folder / "saved"
    shutil.copytree(folder / "run" / "dumps", saved / "run" / "dumps") if (folder / "run" / "dumps").exists() else None
    if (folder / "dataset" / "data").exists():
        shutil.copytree(folder / "dataset" / "data", saved / "data")
    return saved


def pack(case: Case, folder: Path) -> None:
    """Make the dataset, if the extraction has not."""
    if case.mode != ONE_STEP:
        command = ("pack", "run", "--out", "dataset", "--shard-size", SHARD_SIZE)
        assert client.run(*command, cwd=folder) == 0, (folder / "out.txt").read_text()


def num_lines(folder: Path) -> int:
    path = folder / "run" / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ledger_of(folder: Path) -> list[LedgerEntry]:
    return list(read_ledger(folder / "run" / "ledger.jsonl"))


def finished(entries: list[LedgerEntry]) -> set[str]:
    return {entry.key for entry in entries if entry.status is SampleStatus.DONE}


def num_recomputed(folder: Path, before: list[LedgerEntry]) -> int:
    """Return how many samples were finished again that were finished before; must be 0."""
    return sum(entry.key in finished(before) for entry in ledger_of(folder)[len(before) :])


def shards_of(dataset: Path) -> dict[str, str]:
    """Return name -> SHA-256 of a dataset's shards."""
    return {shard.name: shard.sha256 for shard in read_record(Manifest, dataset / "manifest.json").shards}
