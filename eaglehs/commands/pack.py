"""`eaglehs pack`: a run to a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..schemas.counts import counted
from ..schemas.keys import shown_id
from ..schemas.sizes import format_size, parse_size
from .options import CodecName, JsonFlag, choice

if TYPE_CHECKING:
    from ..builder.pack import PackSummary


def pack(
    run: Annotated[Path, typer.Argument(metavar="[RUN]", help="A folder that `eaglehs extract` wrote.")] = Path("run"),
    out: Annotated[Path, typer.Option("--out", help="Folder of the dataset.")] = Path("dataset"),
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Upper bound of a shard file: 2GB is decimal, 2GiB binary.")
    ] = "2GB",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Shards written at once; the bytes do not depend on it.")
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option("--shuffle", metavar="SEED", help="Mix the samples over all shards, by this seed.")
    ] = None,
    shard_multiple: Annotated[
        int,
        typer.Option(
            "--shard-multiple",
            min=1,
            metavar="N",
            help="Make a number of shards that N divides, of about equal tokens: for N readers.",
        ),
    ] = 1,
    codec: Annotated[
        CodecName,
        choice(
            "--codec",
            CodecName,
            text="How states are stored. planes-zstd, lossless, is smaller and for archives: stock readers then need "
            "eaglehs.decode, and nothing can be mapped.",
        ),
    ] = "plain",
    partial: Annotated[
        bool, typer.Option("--partial", help="Pack a run that is not finished, without what is missing.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Pack a run's dumps into tar shards with index, manifest and card, ready for `load_dataset` and for the Hub.

    Every dump is checked again. One that is bad is set aside with its reason, and the command exits with 1. A killed
    pack goes on at its unfinished shard; the same command again does nothing.

    eaglehs pack

    eaglehs pack run --out kimi-k25-hs --shard-size 2GB --shuffle 1
    """
    from ..builder.pack import PackSettings, pack_run
    from ..builder.run_reader import read_run_record
    from ..builder.worker_count import worker_count
    from ..cards.write import is_report_stale, write_card
    from ..schemas.states import Codec

    settings = PackSettings(
        shard_size_bytes=parse_size(shard_size),
        workers=worker_count(workers),
        shuffle_seed=shuffle,
        shard_multiple=shard_multiple,
        codec=Codec(codec),
        allow_partial=partial,
    )
    facts = read_run_record(run).prompts
    with console.progress("pack", total_samples=facts.num_prompts, total_tokens=facts.num_tokens) as progress:
        summary = pack_run(run, out, settings, progress)
    card = write_card(out)
    if is_report_stale(out):
        console.say(f"warning: {out / 'plots'} is of the shards before; make it anew: eaglehs report {out}")
    console.print_json(summary) if json else _show(summary, card)
    if summary.set_aside:
        raise typer.Exit(1)


def _show(summary: PackSummary, card: Path) -> None:
    totals = summary.totals
    for item in summary.set_aside:
        console.say(f"set aside: {item.key} (id {shown_id(item.id)}): {item.reason}")
    for reason, count in summary.failed.items():
        console.say(f"not in the dataset: {count} x {reason}")
    if summary.is_unchanged:
        console.say(
            f"{summary.dataset} is the packed dataset of this run and these settings already; nothing was written"
        )
    console.out(
        f"{summary.dataset}: {counted(totals.num_samples, 'sample')}, {counted(totals.num_tokens, 'token')} "
        f"({totals.num_trainable:,} trained on), {format_size(totals.size_bytes)} in "
        f"{counted(summary.num_shards, 'shard')}; card {card}"
    )
