"""`eaglehs extract`: prompts to a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..schemas.counts import counted
from ..schemas.errors import StorageError
from ..schemas.keys import shown_id
from ..schemas.sizes import format_size, parse_size
from .options import (
    WEEK_S,
    CodecName,
    EngineName,
    JsonFlag,
    LayerList,
    MaskName,
    ModelName,
    ModelRevision,
    ProfileName,
    SglangPython,
    TrustFlag,
    UntestedFlag,
    choice,
    parse_layers,
    refuse_idle,
    refuse_local_revision,
    sglang_arguments,
)

if TYPE_CHECKING:
    from ..extract_run import ExtractPlan, ExtractSettings
    from ..extract_summary import ExtractSummary
    from ..preflight import Forecast


def extract(
    context: typer.Context,
    model: ModelName,
    prompts: Annotated[str, typer.Option("--prompts", help="JSONL, Parquet, or a dataset's name.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; an unfinished one is gone on with.")] = Path(
        "run"
    ),
    engine: Annotated[
        EngineName,
        choice("--engine", EngineName, text="auto: sglang where it is installed with a GPU, else transformers."),
    ] = "auto",
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            help="URL of a server that `eaglehs serve` runs on this machine. Of several, give each: URL=DUMPDIR.",
        ),
    ] = None,
    profile: ProfileName = None,
    layers: LayerList = None,
    revision: ModelRevision = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Cut longer prompts, ids and mask together.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Take only the first N usable prompts.")] = None,
    loss_mask: Annotated[
        MaskName,
        choice("--loss-mask", MaskName, text="Tokens to train on: every turn of the assistant, the last one, or all."),
    ] = "assistant",
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests under way at once (1 repeats bit for bit).")
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option("--dump-dir", help="Where the server dumps before samples are checked and kept.")
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option("--pack", metavar="DATASET", help="Write samples straight into the shards of this dataset."),
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option("--shard-size", help="With --pack: upper bound of a shard file. Default: 2GB.")
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option("--shuffle", metavar="SEED", help="With --pack: mix the samples over all shards.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="ORG/NAME", help="With --pack: send finished shards to the Hub as they come."),
    ] = None,
    delete_pushed: Annotated[
        bool, typer.Option("--delete-pushed", help="With --push: delete a shard here once the Hub has it for good.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="With --push: make a new repository private.")] = False,
    license_id: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="With --push: license for the card, as of `push`.")
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license-name", metavar="NAME", help="What the license `other` is called.")
    ] = None,
    shard_multiple: Annotated[
        int | None,
        typer.Option(
            "--shard-multiple",
            min=1,
            metavar="N",
            help="With --pack: a shard count that N divides, of about equal tokens.",
        ),
    ] = None,
    codec: Annotated[
        CodecName | None,
        choice("--codec", CodecName, text="With --pack: how states are stored, as of `eaglehs pack`."),
    ] = None,
    spool_size: Annotated[
        str | None,
        typer.Option(
            "--spool-size",
            help="Most bytes of dumps under way or waiting; fewer requests are sent when it is full. "
            "Default: half of what is free in the dump folder, at most what the requests need.",
        ),
    ] = None,
    max_failed: Annotated[
        int, typer.Option("--max-failed", min=0, help="Stop when more samples than this have failed for good.")
    ] = 10,
    max_skipped_share: Annotated[
        float,
        typer.Option("--max-skipped-share", min=0, max=1, help="Refuse prompts of which more must be skipped."),
    ] = 0.2,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port of the server. Default: one that is free.")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option("--start-timeout", min=1, max=WEEK_S, help="Seconds until the server must answer.")
    ] = 1800.0,
    stall_timeout: Annotated[
        float,
        typer.Option(
            "--stall-timeout", min=1, max=WEEK_S, help="Seconds without any answer or dump until a server hangs."
        ),
    ] = 600.0,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Starts again of our own server after it died or hung.")
    ] = 3,
    sglang_python: SglangPython = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Ask SGLang for the same rows whatever else is in a batch; slower."),
    ] = False,
    trust_remote_code: TrustFlag = False,
    allow_untested: UntestedFlag = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count tokens, bytes, shards, room and time; start nothing.")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.001, max=1e9, help="Tokens a second, for the time that --dry-run tells."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Run prompts through the target model once and keep the states that a drafter trains on.

    Finished samples are never computed again: the same command goes on after a stop, a crash or a full disk.
    With --pack there is no second step, and the disk is needed once instead of twice; the bytes are those of
    `eaglehs pack`. With --push as well, finished shards go to the Hub as they come; with --delete-pushed the disk
    needs room for a few of them only. What stands after -- goes to SGLang.

    eaglehs extract --model moonshotai/Kimi-K2.5 --profile kimi-k25 --prompts prompts.jsonl

    eaglehs extract --model ./tiny --prompts prompts.jsonl --engine transformers --limit 100
    """
    from ..engine_start import EngineSettings
    from ..extract_run import ExtractSettings
    from ..packing_keeper import PackOptions
    from ..push_stream import PushOptions
    from ..schemas.states import Codec

    if not dry_run:
        refuse_idle(context, ("rate",), without="without --dry-run")
    refuse_local_revision(context, model)
    if pack is None and (shard_size, shuffle, shard_multiple, codec) != (None, None, None, None):
        raise typer.BadParameter(
            "--shard-size, --shuffle, --shard-multiple and --codec need --pack DATASET; "
            "without it they are for eaglehs pack"
        )
    pushed = PushOptions(
        repo=push or "",
        private=private,
        license=license_id or "",
        license_name=license_name or "",
        deletes=delete_pushed,
    )
    if push is None and pushed != PushOptions(repo=""):
        raise typer.BadParameter("--delete-pushed, --private, --license and --license-name need --push ORG/NAME")
    if pack is not None and out.resolve().is_relative_to(pack.resolve()):
        raise typer.BadParameter(
            f"the run (--out {out}) would lie in the dataset's folder (--pack {pack}) and be published with it; "
            "give each a folder of its own"
        )
    if push is not None and pack is None:
        raise typer.BadParameter("--push needs --pack DATASET: shards are what is sent")
    if delete_pushed and shuffle is not None:
        raise typer.BadParameter(
            "--delete-pushed needs shards that fill up one after another; --shuffle fills all at once. "
            "Mix the prompts beforehand instead"
        )
    settings = ExtractSettings(
        model=model,
        prompts=prompts,
        out=out,
        revision=revision,
        layers=parse_layers(layers),
        loss_mask=loss_mask,
        max_tokens=max_tokens,
        limit=limit,
        max_failed=max_failed,
        max_skipped_share=max_skipped_share,
        pack=PackOptions(
            dataset=pack,
            shard_size_bytes=parse_size(shard_size or "2GB"),
            shuffle_seed=shuffle,
            is_drained=delete_pushed,
            shard_multiple=shard_multiple or 1,
            codec=Codec(codec or "plain"),
        )
        if pack
        else None,
        push=pushed if push else None,
        spool_bytes=parse_size(spool_size) if spool_size else None,
        rate=rate,
        engine=EngineSettings(
            name=engine,
            concurrency=concurrency,
            dump_dir=dump_dir,
            servers=tuple(server or ()),
            profile=profile,
            port=port,
            start_timeout_s=start_timeout,
            stall_timeout_s=stall_timeout,
            max_restarts=max_restarts,
            sglang_python=sglang_python,
            sglang_args=sglang_arguments(context),
            deterministic=deterministic,
            trust_remote_code=trust_remote_code,
            allow_untested=allow_untested,
        ),
        command=tuple(sys.argv),
    )
    _dry_run(settings, is_json=json) if dry_run else _extract(settings, is_json=json)


def _dry_run(settings: ExtractSettings, *, is_json: bool) -> None:
    from ..extract_run import plan_extract

    with console.progress("model") as progress:
        plan = plan_extract(settings, progress)
    console.print_json(plan) if is_json else console.out(_plan_text(plan))
    for fault in plan.forecast.faults:
        console.say(f"error: {fault}")
    if plan.forecast.faults:
        raise typer.Exit(StorageError.exit_code)


def _extract(settings: ExtractSettings, *, is_json: bool) -> None:
    from ..extract_run import extract as run_extract

    with console.progress("model") as progress:
        summary = run_extract(settings, progress)
    console.print_json(summary) if is_json else console.out(_summary_text(summary))
    if summary.num_failed:
        raise typer.Exit(1)


def _plan_text(plan: ExtractPlan) -> str:
    model, skipped = plan.model, _counts(plan.skipped)
    layers = counted(model.num_layers, "layer")
    shape = f"{model.architecture}, {layers}, width {model.hidden_size}, vocab {model.vocab_size}"
    return "\n".join(
        (
            f"model      {model.name} ({shape})",
            f"engine     {plan.engine}: {plan.engine_reason}",
            f"states     layers {', '.join(map(str, plan.layers))} (input of each) and final",
            f"prompts    {plan.num_prompts:,} ({plan.num_finished:,} finished already), {skipped} skipped",
            f"tokens     {plan.num_tokens:,}, of which {plan.num_trainable:,} trained on",
            f"bytes      {format_size(plan.size_bytes)} ({plan.bytes_per_token:,} a token)",
            *_forecast_lines(plan.forecast),
        )
    )


def _forecast_lines(forecast: Forecast) -> Iterator[str]:
    where = f"in {forecast.dataset}" if forecast.dataset else "when it is packed"
    yield f"shards     {forecast.num_shards:,}, {format_size(forecast.dataset_bytes)} {where}"
    yield f"to do      {counted(forecast.num_pending, 'prompt')}, {counted(forecast.pending_tokens, 'token')}"
    yield f"spool      at most {format_size(forecast.spool_bytes)}"
    for space in forecast.spaces:
        folders = ", ".join(space.folders)
        yield f"room       {folders}: needs {format_size(space.needed_bytes)}, {format_size(space.free_bytes)} are free"
    if forecast.seconds is None or forecast.tokens_per_s is None:
        yield "time       unknown: nothing was measured yet, and no --rate is given"
    else:
        yield f"time       {timedelta(seconds=round(forecast.seconds))} at {forecast.tokens_per_s:,.0f} tokens/s"
    yield from (f"warning    {warning}" for warning in forecast.warnings)


def _summary_text(summary: ExtractSummary) -> str:
    norms = ", ".join(f"{state} {norm:.3g}" for state, norm in summary.state_norms.items())
    share = summary.num_trainable / max(summary.num_tokens, 1)
    samples = (
        f"{counted(summary.num_samples, 'sample')} ({summary.num_new:,} new), {counted(summary.num_tokens, 'token')}"
    )
    failed = f"{_counts(summary.failed)} failed, {_counts(summary.skipped)} skipped"
    return "\n".join(
        (
            f"{summary.run}: {samples} ({share:.1%} trained on), {failed}",
            f"mean row norms: {norms}",
            *(f"failed: {shown_id(failure.id)}: {failure.reason}" for failure in summary.failures),
            _next(summary),
        )
    )


def _next(summary: ExtractSummary) -> str:
    packed = summary.dataset
    if packed is None:
        return f"next: eaglehs pack {summary.run}"
    size = format_size(packed.totals.size_bytes)
    samples, shards = counted(packed.totals.num_samples, "sample"), counted(packed.num_shards, "shard")
    told = f"{packed.dataset}: {samples}, {size} in {shards}"
    if summary.published is None:
        return told
    return f"{told}\npublished: {summary.published.repo}, revision {summary.published.revision}"


def _counts(skipped: dict[str, int]) -> str:
    total = sum(skipped.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(skipped.items()))
    return f"{total:,} ({reasons})" if total else "0"
