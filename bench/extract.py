"""The client without a model: one step beside two, memory over the number of prompts, and what a resume costs.

    python -m bench.extract [--folder DIR] [--rounds 5] [--size 400MB] [--prompts 10000] [--finished 100000]

The engine writes dumps of states that are in memory already, so what is timed is all that eaglehs does around a server:
checks, copies, syncs, ledger, shards, index. Memory and resume run under /dev/shm, where a sync costs nothing. Last,
where EAGLEHS_SGLANG_PYTHON names a Python with SGLang: capture on the CPU, as bench/gpu/overhead.py has it on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from eaglehs.extraction.engines.protocol import Answer
from eaglehs.extraction.run_store import open_store
from eaglehs.extraction.sink import write_dump
from eaglehs.schemas.dump import DumpName
from eaglehs.schemas.ledger import LedgerEntry, SampleStatus
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.prompt import Prompt
from eaglehs.schemas.run import RunFolder
from eaglehs.schemas.sample import DumpRef
from eaglehs.schemas.sizes import format_size, parse_size
from eaglehs.schemas.states import bytes_per_token, state_names

from bench.table import measure, peak_bytes, print_table, ratio_rows
from eaglehs.memory import PLAIN_ALLOCATION, allocate_plainly
from eaglehs.packing_keeper import PackOptions, open_packing
from tests.factories.extractions import LAYOUT, extract_one_step, extract_two_steps, record_of
from tests.fakes.engine import FakeEngine
from tests.sglang_cpu.rig import PYTHON_VARIABLE, sglang_python

SHARED_MEMORY = "/dev/shm"
WIDE = 2048
LONG = 512


class ReadyEngine(FakeEngine):
    """Dumps states that are there already: random ones, the same for every prompt."""

    def __init__(self, spool: Path, num_tokens: int, hidden_size: int) -> None:
        super().__init__(spool, layers=LAYOUT.layers, hidden_size=hidden_size, concurrency=8)
        self.states = {name: torch.randn(num_tokens, hidden_size).bfloat16() for name in state_names(self.layers)}

    async def capture(self, prompt: Prompt, rid: str) -> Answer:
        """Write the dump in a thread, as a server would beside the client."""
        dump = await asyncio.to_thread(self._dump, prompt, rid)
        return Answer(dumps=(dump,), next_token=5, cached_tokens=0)

    def _dump(self, prompt: Prompt, rid: str) -> Path:
        return write_dump(
            self.spool,
            DumpName(rid=rid, start=0, end=prompt.num_tokens),
            layers=self.layers,
            prompt_tokens=prompt.num_tokens,
            input_ids=torch.as_tensor(np.asarray(prompt.input_ids)),
            states={name: state[: prompt.num_tokens] for name, state in self.states.items()},
        )


def make_prompts(count: int, num_tokens: int) -> list[Prompt]:
    """Return prompts of one length; ids differ from prompt to prompt."""
    mask = np.ones(num_tokens, dtype=np.uint8)
    draw = np.random.default_rng(0)
    return [
        Prompt(
            key=f"p{number:06d}",
            id=f"p{number:06d}",
            source=f"bench.jsonl:{number}",
            input_ids=draw.integers(0, 500, num_tokens, dtype=np.int32),
            loss_mask=mask,
        )
        for number in range(count)
    ]


def both_ways(folder: Path, size_bytes: int) -> dict[str, Callable[[], int]]:
    """Return one step and two steps over the same work, each from an empty folder to a whole dataset."""
    per_token = bytes_per_token(LAYOUT.layers, WIDE)
    prompts = make_prompts(max(size_bytes // (LONG * per_token), 1), LONG)
    engine = ReadyEngine(folder / "spool", LONG, WIDE)

    def run(way: Callable[..., object]) -> int:
        options = PackOptions(dataset=folder / "dataset", shard_size_bytes=100_000_000)
        way(folder / "run", prompts, engine, options)
        moved = len(prompts) * LONG * per_token
        shutil.rmtree(folder / "run")
        shutil.rmtree(folder / "dataset")
        return moved

    return {"two steps": lambda: run(extract_two_steps), "one step": lambda: run(extract_one_step)}


def memory_of(count: int, way: str) -> int:
    """Return the peak resident bytes of a process of its own that extracts `count` prompts."""
    command = [sys.executable, "-m", "bench.extract", "--child", str(count), way]
    environment = {**os.environ, **PLAIN_ALLOCATION}  # as `extract` sets it before Arrow is there
    return int(json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout))


def extract_here(count: int, way: str) -> None:
    """Extract `count` prompts and print this process's peak of resident bytes."""
    allocate_plainly()
    prompts = make_prompts(count, 24)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place:
        folder = Path(place)
        engine = ReadyEngine(folder / "spool", 24, LAYOUT.hidden_size)
        # Shards of about 100 samples, so that few prompts and many fill shards of one size: a shard is sealed whole.
        options = PackOptions(dataset=folder / "dataset", shard_size_bytes=1_000_000)
        {"one": extract_one_step, "two": extract_two_steps}[way](folder / "run", prompts, engine, options)
        print(peak_bytes())


def memory_rows(most: int) -> list[list[str]]:
    rows = []
    for way in ("one", "two"):
        few, many = memory_of(100, way), memory_of(most, way)
        rows.append(
            [f"{way} step{'s' if way == 'two' else ''}", format_size(few), format_size(many), f"{many / few:.3f}"]
        )
    return rows


def resume_rows(count: int, packed: int) -> list[list[str]]:
    """Time what a start of a run does before the first request, with `count` samples finished."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place:
        return [_resume_of_dumps(Path(place), count), _resume_of_shards(Path(place), packed)]


def _resume_of_dumps(place: Path, count: int) -> list[str]:
    prompts, folder = make_prompts(count, 4), RunFolder(place / "run")
    folder.root.mkdir()
    store = open_store(folder, record_of(prompts), prompts)
    with folder.ledger.open("wb") as ledger:
        for prompt in prompts:
            name = f"eh-{store.record.run_id}-{prompt.key}-100.000000-000004.pt"
            path = folder.dump_path(prompt.key, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            ledger.write(_line(prompt, name).encode() + b"\n")
    begun, cpu = time.perf_counter(), time.process_time()
    again = open_store(folder, record_of(prompts), prompts)
    repairs = again.repair()
    left = again.pending(prompts)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    assert (repairs.lost_samples, repairs.orphan_files, left) == (0, 0, [])
    return [f"{count:,} samples, dumps in the run", f"{seconds:.2f} s", f"{cpu:.2f} s"]


def _resume_of_shards(place: Path, count: int) -> list[str]:
    prompts = make_prompts(count, 24)
    options = PackOptions(dataset=place / "dataset", shard_size_bytes=50_000_000)
    extract_one_step(place / "packed", prompts, ReadyEngine(place / "spool", 24, LAYOUT.hidden_size), options)
    begun, cpu = time.perf_counter(), time.process_time()
    store = open_store(RunFolder(place / "packed"), record_of(prompts, options), prompts)
    with open_packing(store, options, Silent()) as (_, held):
        repairs = store.repair(held)
        left = store.pending(prompts)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    assert (repairs.lost_samples, left) == (0, [])
    return [f"{count:,} samples, in shards", f"{seconds:.2f} s", f"{cpu:.2f} s"]


def capture_report(python: Path, rounds: int) -> str:
    """Return the table of bench/gpu/overhead.py for a tiny Llama on the CPU, with real SGLang."""
    from eaglehs.extraction.profile import load_profile

    from bench.gpu import overhead
    from tests.factories.models import write_tiny_llama
    from tests.sglang_cpu.rig import cpu_environment

    profile = load_profile("cpu")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place:
        folder = Path(place)
        os.environ.update({**cpu_environment(python, folder / "rig"), **profile.environment})
        given = argparse.Namespace(
            model=str(write_tiny_llama(folder / "model")),
            layers="1,4,6",
            width=128,
            vocab=500,
            prompts=48,
            tokens=LONG,
            concurrency=8,
            passes=rounds,
            warm=16,
            keep=None,
            sglang_python=str(python),
            dump_dir=folder / "dumps",
            logs=folder,
            sglang_args=[*profile.server.arguments(), "--chunked-prefill-size", "2048"],
        )
        return overhead.report(overhead.measure(given))


def _line(prompt: Prompt, name: str) -> str:
    from eaglehs.schemas import codec

    dump = DumpRef(name=name, size_bytes=0, xxh3_128="0" * 32)
    norms = dict.fromkeys(state_names(LAYOUT.layers), 1.25)
    entry = LedgerEntry(
        key=prompt.key,
        id=prompt.id,
        num_tokens=prompt.num_tokens,
        status=SampleStatus.DONE,
        attempt=100,
        dumps=(dump,),
        state_norms=norms,
    )
    return codec.dumps(entry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where runs and datasets are made and removed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=parse_size, default=400_000_000, help="bytes of states a round")
    parser.add_argument("--prompts", type=int, default=10_000, help="the larger number of prompts for memory")
    parser.add_argument("--finished", type=int, default=100_000, help="finished samples of the run that is resumed")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        extract_here(int(given.child[0]), given.child[1])
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        measured = measure(both_ways(Path(place), given.size), given.rounds)
    columns = ("prompts to dataset", "GB/s", "ratio", "spread", "CPU s/GB")
    print_table(f"One step and two, {format_size(given.size)}", columns, ratio_rows(measured, "two steps"))
    rows = memory_rows(given.prompts)
    print_table("Peak memory of the client", ("way", "100 prompts", f"{given.prompts:,} prompts", "ratio"), rows)
    print_table("A start before its first request", ("run", "wall", "CPU"), resume_rows(given.finished, given.prompts))
    python = sglang_python()
    told = capture_report(python, given.rounds) if python else f"not run: {PYTHON_VARIABLE} is not set"
    print(f"\n### Capture overhead on the CPU, a Llama of width 128\n\n{told}")


if __name__ == "__main__":
    main()
