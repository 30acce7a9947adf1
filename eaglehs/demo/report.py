"""What the demo has done, as a record and as a table for eyes."""

from __future__ import annotations

from dataclasses import dataclass

from ..console import out
from ..schemas.counts import counted
from ..schemas.sizes import format_size

_KIMI = "eaglehs extract --model moonshotai/Kimi-K2.5 --profile kimi-k25 --trust-remote-code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the path."""

    name: str
    seconds: float
    num_samples: int
    num_tokens: int
    size_bytes: int
    is_new: bool
    """False where an earlier start had done it: the time is then no measure."""

    note: str
    """What it did, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array of the sample or batch that is shown."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """All of it."""

    folder: str
    model: str
    prompts: str
    run: str
    dataset: str
    stages: tuple[Stage, ...]
    sample_key: str
    sample: tuple[Array, ...]
    batch: tuple[Array, ...]
    num_shards: int

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.seconds for stage in self.stages)


def show_report(report: DemoReport) -> None:
    """Print the report on stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_stage_table(report))
    console.print(_array_table(report))
    out(_next_steps(report))


def _stage_table(report: DemoReport) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    last = report.stages[-1]
    counts = f"{counted(last.num_samples, 'sample')}, {counted(last.num_tokens, 'token')}"
    shards = counted(report.num_shards, "shard")
    table = Table(title=f"{counts}, {shards} in {report.seconds:.0f} s", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    for column in ("time", "bytes", "bytes/s", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what")
    for stage in report.stages:
        size = format_size(stage.size_bytes) if stage.size_bytes else ""
        note = stage.note if stage.is_new else f"was there: {stage.note}"
        table.add_row(stage.name, f"{stage.seconds:.1f} s", size, *_rates(stage), note)
    return table


def _rates(stage: Stage) -> tuple[str, str]:
    if not stage.is_new:
        return "", ""
    seconds = max(stage.seconds, 1e-3)
    bytes_rate = f"{format_size(stage.size_bytes / seconds)}" if stage.size_bytes else ""
    return bytes_rate, f"{stage.num_tokens / seconds:,.0f}" if stage.num_tokens else ""


def _array_table(report: DemoReport) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="What a training loop gets", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("array", no_wrap=True)
    table.add_column(f"sample `{report.sample_key}`", no_wrap=True)
    table.add_column("eaglehs.collate(4 samples)", no_wrap=True)
    sample = {array.name: array for array in report.sample}
    for array in report.batch:
        table.add_row(array.name, _shape(sample.get(array.name)), _shape(array))
    return table


def _shape(array: Array | None) -> str:
    return "" if array is None else f"{array.dtype} {list(array.shape)}".replace("[", r"\[")


def _next_steps(report: DemoReport) -> str:
    return f"""The dataset is in {report.dataset}. Read it in training code, with stock `datasets` or with eaglehs:

    load_dataset("{report.dataset}", split="train", streaming=True)
    eaglehs.stream("{report.dataset}")

See a drafter learn from it:

    python examples/train_drafter.py {report.dataset} --model {report.model}

Look into it, make a card with charts and a preview, and see what a push would do:

    eaglehs report {report.dataset} --tokenizer {report.model}
    eaglehs card {report.dataset} --license mit --preview 20 --tokenizer {report.model}
    eaglehs push {report.dataset} org/name --dry-run

Do the same for a real model, on a machine with GPUs:

    pip install 'eaglehs[sglang]'
    {_KIMI} --prompts {report.prompts} --dry-run
    {_KIMI} --prompts {report.prompts}
    eaglehs pack run --out dataset --shard-size 2GB
"""
