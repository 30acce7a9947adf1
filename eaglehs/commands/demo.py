"""`eaglehs demo`: the whole path on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from .options import JsonFlag


def demo(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where the model, run and dataset go.")] = Path(
        "demo"
    ),
    json: JsonFlag = False,
) -> None:
    """Show the whole path, from conversations to a training batch, on a tiny Kimi-shaped model on the CPU.

    Needs no GPU and no network, and takes about a minute. A second start goes on with what is there.

    eaglehs demo

    eaglehs demo /tmp/try --json
    """
    from ..demo.demo import run_demo
    from ..demo.report import show_report

    report = run_demo(folder)
    console.print_json(report) if json else show_report(report)
