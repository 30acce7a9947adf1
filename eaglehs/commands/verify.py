"""`eaglehs verify`: check a run or a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from ..schemas.errors import UsageError
from ..schemas.sizes import format_size
from .options import JsonFlag

_HUB = "hf://"
_MOST_LINES = 100
"""Faults shown to a person; --json has all."""


def verify(
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="A run or a dataset.")] = "dataset",
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Shards read at once.")] = None,
    json: JsonFlag = False,
) -> None:
    """Check every file and every value of a run or a dataset, from its files alone.

    Checksums, tar structure, index, token ids, masks, and that all states are finite and plausible. Names every fault;
    exits with 1 if there is one.

    eaglehs verify dataset

    eaglehs verify run --json
    """
    from ..builder.verify import verify as verify_path
    from ..builder.worker_count import worker_count

    if path.startswith(_HUB):
        name = path.removeprefix(_HUB).removeprefix("datasets/")
        raise UsageError(
            f"{path} is on the Hub; verify reads local folders",
            mend=f"Run `hf download {name} --repo-type dataset --local-dir DIR`, then `eaglehs verify DIR`",
        )
    with console.progress("verify") as progress:
        report = verify_path(Path(path), progress, workers=worker_count(workers))
    if json:
        console.print_json(report)
    for fault in () if json else report.faults[:_MOST_LINES]:
        console.say(f"fault: {fault}")
    if not json:
        more = f", of which {_MOST_LINES} are shown (all with --json)" if len(report.faults) > _MOST_LINES else ""
        console.out(
            f"{report.path}: {report.num_samples:,} samples, {report.num_tokens:,} tokens, "
            f"{format_size(report.size_bytes)} in {report.num_files} files: {len(report.faults)} faults{more}"
        )
    if report.faults:
        raise typer.Exit(1)
