"""`eaglehs report`: plots and tables of a dataset, for eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from .options import JsonFlag, TrustFlag, refuse_idle


def report(
    context: typer.Context,
    dataset: Annotated[Path, typer.Argument(metavar="[DATASET]", help="A folder that `eaglehs pack` wrote.")] = Path(
        "dataset"
    ),
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the report. Default: plots/ in the dataset.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Samples whose states are read, evenly spaced; 0 for all.")
    ] = 256,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Model whose tokenizer turns the ids of shown samples into text.")
    ] = None,
    trust_remote_code: TrustFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write one page about a dataset, for eyes, and its charts as PNG.

    Lengths, mask shares, norms by state and position, outlier channels, cosines of neighbouring states, shards, and
    samples coloured by mask or norm. Lengths, mask and shards are those of the whole dataset; states are read of
    --samples. The page needs no network. The next `eaglehs card` shows the charts. Needs matplotlib: eaglehs[plots].

    eaglehs report

    eaglehs report kimi-k25-hs --samples 0 --tokenizer moonshotai/Kimi-K2.5 --trust-remote-code
    """
    from ..report_dataset import ReportSettings, report_dataset

    if tokenizer is None:
        refuse_idle(context, ("trust_remote_code",), without="without --tokenizer")
    settings = ReportSettings(
        out=out, max_samples=samples or None, tokenizer=tokenizer, trust_remote_code=trust_remote_code
    )
    with console.progress("report") as progress:
        summary = report_dataset(dataset, settings, progress)
    console.print_json(summary) if json else console.out(summary.page)
