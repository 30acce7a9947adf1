"""What capture costs a server: tokens a second without the plugin, with it idle, and with it capturing.

    python -m bench.gpu.overhead --model M --sglang-python PY --dump-dir /dev/shm/ehs -- SGLANG ARGS

Prefill-bound: prompts of 1,730 random tokens, 16 under way, one new token each. "Idle" are requests that are not ours
at the server that captures. Runs alternate on one server; the server without the plugin is another start of the same
command. A consumer frees the dumps, as `eaglehs extract` does; `--keep` spares those of the pass that warms up, for
`bench.codec --dumps`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gpu.load import Consumer, Rate, random_ids, send_all
from bench.gpu.servers import add_server_arguments, server_with_plugin, server_without_plugin, settings_of

WIDTH_BYTES_PER_STATE = 2
WARM = "eh-bench-warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of the load."""

    variant: str
    tokens_per_s: float
    states_gb_per_s: float


class Load:
    """The same load again and again, with other ids each time."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.num_passes = 0

    def run(self, url: str, *, rid_prefix: str, num_prompts: int | None = None) -> Rate:
        """Send one pass of prompts."""
        self.num_passes += 1
        count = num_prompts or self.given.prompts
        prompts = {
            f"{rid_prefix}{self.num_passes}x{number}-0": random_ids(
                self.given.tokens, self.num_passes * 10_000 + number, self.given.vocab
            )
            for number in range(count)
        }
        return send_all(url, prompts, self.given.concurrency)


def measure(given: argparse.Namespace) -> list[Pass]:
    """Run all passes."""
    load, passes = Load(given), []
    with server_without_plugin(settings_of(given, "plain")) as url:
        load.run(url, rid_prefix="warm-", num_prompts=given.warm)
        passes += [_idle("no plugin", load.run(url, rid_prefix="plain-")) for _ in range(given.passes)]
    take = partial(_take, keep=given.keep)
    with server_with_plugin(settings_of(given, "plugin")) as url, Consumer(given.dump_dir, take) as consumer:
        load.run(url, rid_prefix=WARM, num_prompts=given.warm)
        time.sleep(1)
        for _ in range(given.passes):
            passes.append(_idle("plugin, idle", load.run(url, rid_prefix="other-")))
            passes.append(_captured(load, url, consumer, given))
        passes.append(_idle("plugin, idle", load.run(url, rid_prefix="other-")))
    return passes


def _take(path: Path, keep: Path | None) -> None:
    if keep is not None and path.name.startswith(WARM):
        path.replace(keep / path.name)
    else:
        path.unlink()


def _idle(variant: str, rate: Rate) -> Pass:
    return Pass(variant=variant, tokens_per_s=rate.tokens_per_s, states_gb_per_s=0.0)


def _captured(load: Load, url: str, consumer: Consumer, given: argparse.Namespace) -> Pass:
    before = consumer.size_bytes
    rate = load.run(url, rid_prefix="eh-bench-p")
    num_states = len(given.layers.split(",")) + 1
    expected = given.prompts * given.tokens * num_states * given.width * WIDTH_BYTES_PER_STATE
    if not consumer.wait_for(before + expected):
        raise SystemExit(f"dumps are missing: {consumer.size_bytes - before:,} of {expected:,} bytes and more")
    size = consumer.size_bytes - before
    return Pass(variant="plugin, capturing", tokens_per_s=rate.tokens_per_s, states_gb_per_s=size / rate.seconds / 1e9)


def report(passes: list[Pass]) -> str:
    """Return a table: medians, spreads and the ratio to the server without the plugin."""
    groups: dict[str, list[Pass]] = {}
    for one in passes:
        groups.setdefault(one.variant, []).append(one)
    base = statistics.median(one.tokens_per_s for one in groups["no plugin"])
    lines = ["| variant | tokens/s, median (lowest .. highest) | ratio | states |", "|---|---|---|---|"]
    for variant, runs in groups.items():
        rates = [one.tokens_per_s for one in runs]
        median = statistics.median(rates)
        states = statistics.median(one.states_gb_per_s for one in runs)
        spread = f"{median:,.0f} ({min(rates):,.0f} .. {max(rates):,.0f})"
        lines.append(f"| {variant} | {spread} | {median / base:.4f} | {states:.2f} GB/s |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=116)
    parser.add_argument("--tokens", type=int, default=1730)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--warm", type=int, default=48)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--keep", type=Path, help="a folder on the dumps' own disk for those of the pass that warms up")
    add_server_arguments(parser)
    given = parser.parse_args()
    passes = measure(given)
    for one in passes:
        print(json.dumps({"bench": "overhead", "model": given.model, "layers": given.layers, **_plain(one)}))
    print(report(passes), file=sys.stdout)


def _plain(one: Pass) -> dict[str, object]:
    return {name: getattr(one, name) for name in ("variant", "tokens_per_s", "states_gb_per_s")}


if __name__ == "__main__":
    main()
