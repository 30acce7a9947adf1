"""`eaglehs extract`: prompts to a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .. import console
from ..schemas.sizes import format_size
from .options import JsonFlag, LayerList, ModelName, ProfileName, TrustFlag, parse_layers

if TYPE_CHECKING:
    from ..extract_run import ExtractPlan, ExtractSettings, ExtractSummary


def extract(
    context: typer.Context,
    model: ModelName,
    prompts: Annotated[str, typer.Option("--prompts", help="JSONL, Parquet, or a dataset's name.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; an unfinished one is gone on with.")] = Path(
        "run"
    ),
    engine: Annotated[
        Literal["auto", "sglang", "transformers"],
        typer.Option("--engine", help="auto: sglang where it is installed with a GPU, else transformers."),
    ] = "auto",
    server: Annotated[
        str | None, typer.Option("--server", help="URL of a server that `eaglehs serve` runs on this machine.")
    ] = None,
    profile: ProfileName = None,
    layers: LayerList = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Commit or branch of the model.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Cut longer prompts, ids and mask together.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Take only the first N usable prompts.")] = None,
    loss_mask: Annotated[
        Literal["assistant", "last", "all"],
        typer.Option("--loss-mask", help="Tokens to train on: every turn of the assistant, the last one, or all."),
    ] = "assistant",
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests under way at once (1 repeats bit for bit).")
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option("--dump-dir", help="Where the server dumps before samples are checked and kept.")
    ] = None,
    max_failed: Annotated[
        int, typer.Option("--max-failed", min=0, help="Stop when more samples than this have failed for good.")
    ] = 10,
    max_skipped_share: Annotated[
        float, typer.Option("--max-skipped-share", min=0, max=1, help="Refuse prompts of which more must be skipped.")
    ] = 0.2,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port of the server. Default: one that is free.")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option("--start-timeout", min=1, help="Seconds until the server must answer.")
    ] = 1800.0,
    sglang_python: Annotated[
        str | None,
        typer.Option(
            "--sglang-python",
            envvar="EAGLEHS_SGLANG_PYTHON",
            help="Python of the environment that has SGLang, if it is another one.",
        ),
    ] = None,
    trust_remote_code: TrustFlag = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count prompts, tokens and bytes; start nothing.")] = False,
    json: JsonFlag = False,
) -> None:
    """Run prompts through the target model once and keep the states that a drafter trains on.

    Finished samples are never computed again: the same command goes on after a stop, a crash or a full disk.
    What stands after -- goes to SGLang.

    eaglehs extract --model moonshotai/Kimi-K2.5 --profile kimi-k25 --prompts prompts.jsonl

    eaglehs extract --model ./tiny --prompts prompts.jsonl --engine transformers --limit 100
    """
    from ..engine_start import EngineSettings
    from ..extract_run import ExtractSettings

    if context.args and not context.args[0].startswith("-"):
        raise typer.BadParameter(f"unexpected argument {context.args[0]!r}; SGLang's own go after --")
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
        engine=EngineSettings(
            name=engine,
            concurrency=concurrency,
            dump_dir=dump_dir,
            server=server,
            profile=profile,
            port=port,
            start_timeout_s=start_timeout,
            sglang_python=sglang_python,
            sglang_args=tuple(context.args),
            trust_remote_code=trust_remote_code,
        ),
        command=tuple(sys.argv),
    )
    _dry_run(settings, is_json=json) if dry_run else _extract(settings, is_json=json)


def _dry_run(settings: ExtractSettings, *, is_json: bool) -> None:
    from ..extract_run import plan_extract

    with console.progress("model") as progress:
        plan = plan_extract(settings, progress)
    console.print_json(plan) if is_json else console.out(_plan_text(plan))


def _extract(settings: ExtractSettings, *, is_json: bool) -> None:
    from ..extract_run import extract as run_extract

    with console.progress("model") as progress:
        summary = run_extract(settings, progress)
    console.print_json(summary) if is_json else console.out(_summary_text(summary))
    if summary.num_failed:
        raise typer.Exit(1)


def _plan_text(plan: ExtractPlan) -> str:
    model, skipped = plan.model, _counts(plan.skipped)
    shape = f"{model.architecture}, {model.num_layers} layers, width {model.hidden_size}, vocab {model.vocab_size}"
    return "\n".join(
        (
            f"model      {model.name} ({shape})",
            f"engine     {plan.engine}: {plan.engine_reason}",
            f"states     layers {', '.join(map(str, plan.layers))} (input of each) and final",
            f"prompts    {plan.num_prompts:,} ({plan.num_finished:,} finished already), {skipped} skipped",
            f"tokens     {plan.num_tokens:,}, of which {plan.num_trainable:,} trained on",
            f"bytes      {format_size(plan.size_bytes)} ({plan.bytes_per_token:,} a token)",
        )
    )


def _summary_text(summary: ExtractSummary) -> str:
    norms = ", ".join(f"{state} {norm:.3g}" for state, norm in summary.state_norms.items())
    samples = f"{summary.num_samples:,} samples ({summary.num_new:,} new), {summary.num_tokens:,} tokens"
    return "\n".join(
        (
            f"{summary.run}: {samples}, {summary.num_failed:,} failed, {_counts(summary.skipped)} skipped",
            f"mean row norms: {norms}",
            *(f"failed: {failure.id}: {failure.reason}" for failure in summary.failures),
            f"next: eaglehs pack {summary.run}",
        )
    )


def _counts(skipped: dict[str, int]) -> str:
    total = sum(skipped.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(skipped.items()))
    return f"{total:,} ({reasons})" if total else "0"
