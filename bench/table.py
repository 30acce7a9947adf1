"""Figures side by side: each round runs every way once, so that a busy machine weighs on all of them alike."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Way:
    """One way of doing the job, and what it took each time."""

    run: Callable[[], int]
    """Does it once; returns the bytes that it moved."""

    wall: list[float] = field(default_factory=list)
    """GB/s of each round."""

    cpu: list[float] = field(default_factory=list)
    """CPU seconds a GB of each round, of this process and of those that it ran and waited for."""


def measure(
    ways: Mapping[str, Callable[[], int]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, Way]:
    """Run all ways `rounds` times, in turn, after one round that does not count; `before` each, untimed."""
    measured = {name: Way(run) for name, run in ways.items()}
    for number in range(rounds + 1):
        for way in measured.values():
            before()
            cpu, begun = cpu_seconds(), time.perf_counter()
            gigabytes = way.run() / 1e9
            wall, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
            if number:
                way.wall.append(gigabytes / wall)
                way.cpu.append(cpu / gigabytes)
    return measured


def cpu_seconds() -> float:
    """Return what this process and those that it waited for have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_bytes() -> int:
    """Return this process's peak of resident memory; getrusage would count the parent's, from before the exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def ratio_rows(measured: Mapping[str, Way], base: str) -> list[list[str]]:
    """Return a row a way: GB/s, ratio to `base` of the same round (median, spread), CPU seconds a GB."""
    rows = []
    for name, way in measured.items():
        ratios = [own / other for own, other in zip(way.wall, measured[base].wall, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        middle = statistics.median
        rows.append([name, f"{middle(way.wall):.2f}", f"{middle(ratios):.2f}", spread, f"{middle(way.cpu):.2f}"])
    return rows


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a Markdown table."""
    print(f"\n### {title}\n")
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    for number, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
