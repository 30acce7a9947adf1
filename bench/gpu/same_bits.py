"""Whether the asynchronous capture holds the bits that a synchronous one of the same batch gets.

    python -m bench.gpu.same_bits --model M --sglang-python PY --dump-dir /dev/shm/ehs -- SGLANG ARGS

Both run in the same forward passes: bench/gpu/shadow hashes the states of each batch with everything waiting, the
product's ring writes its dumps as always. Each dump is hashed here and held against the shadow's line; its ids are
held against the ids sent; each request's dumps must tile it. Lengths are random, sixteen requests at a time; one
prompt of `--long` tokens comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from eaglehs.schemas.dump import DumpName
from eaglehs.schemas.states import state_names

from bench.gpu.load import Consumer, random_ids, send_all
from bench.gpu.servers import add_server_arguments, server_with_plugin, settings_of
from bench.gpu.shadow.ehs_shadow import hash_of

SHADOW = Path(__file__).parent / "shadow"


class Checked:
    """The hashes of dumps, taken as they come."""

    def __init__(self, prompts: dict[str, list[int]], states: tuple[str, ...]) -> None:
        self.prompts = prompts
        self.states = states
        self.hashes: dict[str, list[str]] = {}
        self.rows: dict[str, list[tuple[int, int]]] = {}
        self.wrong_ids: list[str] = []

    def take(self, path: Path) -> None:
        """Hash one dump and remove it."""
        name = DumpName.parse(path.name)
        dump = torch.load(path, weights_only=True)  # read, not mapped: faults of fresh pages cost more than the copy
        path.unlink()
        sent = self.prompts.get(name.rid)
        if sent is None:
            return
        if dump["input_ids"].tolist() != sent[name.start : name.end]:
            self.wrong_ids.append(path.name)
        self.rows.setdefault(name.rid, []).append((name.start, name.end))
        self.hashes[path.name] = [hash_of(dump[array]) for array in ("input_ids", *self.states)]

    def untiled(self) -> Iterator[str]:
        """Yield requests whose dumps do not cover each row once."""
        for rid, ids in self.prompts.items():
            borders = sorted(self.rows.get(rid, []))
            ends = [0, *(end for _, end in borders)]
            if [start for start, _ in borders] != ends[:-1] or ends[-1] != len(ids):
                yield rid


def measure(given: argparse.Namespace) -> dict[str, object]:
    """Send all prompts, check all dumps, and return the counts."""
    shadow_file = given.logs / "shadow.jsonl"
    shadow_file.unlink(missing_ok=True)
    os.environ["EHS_SHADOW"] = str(shadow_file.absolute())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SHADOW), os.environ.get("PYTHONPATH"))))
    draw = random.Random(7)
    lengths = [draw.randint(1, given.tokens) for _ in range(given.prompts)]
    prompts = {f"eh-bench-s{n}-0": random_ids(length, 500_000 + n, given.vocab) for n, length in enumerate(lengths)}
    long = {"eh-bench-long-0": random_ids(given.long, 999, given.vocab)} if given.long else {}
    layers = tuple(int(layer) for layer in given.layers.split(","))
    checked = Checked(prompts | long, state_names(layers))
    settings = settings_of(given, "same-bits")
    with server_with_plugin(settings) as url, Consumer(given.dump_dir, checked.take, num_threads=4) as consumer:
        rate = send_all(url, prompts, given.concurrency)
        answers = rate.answers
        long_seconds = 0.0
        if long:
            long_rate = send_all(url, long, 1)
            long_seconds, answers = long_rate.seconds, answers | long_rate.answers
        num_tokens = sum(map(len, (prompts | long).values()))
        consumer.wait_for(num_tokens * len(state_names(layers)) * given.width * 2)
    shadow = {line["name"]: line["hashes"] for line in map(json.loads, shadow_file.read_text().splitlines())}
    other = [name for name, hashes in checked.hashes.items() if shadow.get(name) != hashes]
    cached = [rid for rid, answer in answers.items() if answer["meta_info"]["cached_tokens"]]  # type: ignore[index]
    return {
        "bench": "same_bits",
        "model": given.model,
        "requests": len(prompts | long),
        "tokens": num_tokens,
        "dumps": len(checked.hashes),
        "dumps_with_other_bits": len(other),
        "dumps_with_other_ids": len(checked.wrong_ids),
        "requests_not_tiled": len(list(checked.untiled())),
        "requests_with_cached_tokens": len(cached),
        "long_prompt_tokens": given.long,
        "long_prompt_seconds": round(long_seconds, 2),
    }


def main() -> int:
    """Measure, print, and tell by the exit code whether all bits were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=208)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--vocab", type=int, default=32768)
    add_server_arguments(parser)
    result = measure(parser.parse_args())
    print(json.dumps(result))
    faults = ("dumps_with_other_bits", "dumps_with_other_ids", "requests_not_tiled", "requests_with_cached_tokens")
    return int(any(result[fault] for fault in faults) or not result["dumps"])


if __name__ == "__main__":
    sys.exit(main())
