"""`eaglehs verify`: check a run or a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..schemas.codec import encode
from ..schemas.counts import counted
from ..schemas.errors import UsageError
from ..schemas.progress import Progress
from ..schemas.run import RUN_FILENAME
from ..schemas.sizes import format_size
from .numbers import show_numbers
from .options import JsonFlag, ModelRevision, TrustFlag, refuse_idle, refuse_local_revision

if TYPE_CHECKING:
    from ..builder.faults import VerifyReport
    from ..schemas.verified import Verified
    from ..verify_model import ModelCheck

_MOST_LINES = 100
"""Faults shown to a person; --json has all."""

_MODEL_OPTIONS = ("revision", "samples", "max_tokens", "seed", "write_report", "trust_remote_code")


def verify(
    context: typer.Context,
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="A run, a dataset, or hf://datasets/org/name[@revision].")
    ] = "dataset",
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Shards read at once.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A dataset's sizes and structure only; no array is read.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="On the Hub: read all bytes too, and keep none.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="Compute some samples again with this model, and compare the states.")
    ] = None,
    revision: ModelRevision = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="With --model: how many samples.")] = 4,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="With --model: rows of each sample, from its first on.")
    ] = 512,
    seed: Annotated[int, typer.Option("--seed", min=0, help="With --model: another seed takes other samples.")] = 0,
    write_report: Annotated[
        bool, typer.Option("--write-report", help="With --model: keep the result in the dataset and on its card.")
    ] = False,
    trust_remote_code: TrustFlag = False,
    json: JsonFlag = False,
) -> None:
    """Check every file and every value of a run or a dataset, from its files alone.

    Checksums, tar structure, index, token ids, masks, and that all states are finite and plausible. Of a dataset on the
    Hub: that it lists every shard with the size and SHA-256 of the manifest. Names every fault; exits with 1 if there
    is one.

    With --model, samples are computed again by transformers: each stored layer must be nearest to its own state of the
    model and as near as bfloat16 explains, and the LM head must make the stored next token of the last row.

    eaglehs verify dataset

    eaglehs verify hf://datasets/org/name --deep

    eaglehs verify dataset --model ./model --samples 8 --write-report
    """
    check = None
    if model is not None:
        from ..verify_model import ModelCheck

        refuse_local_revision(context, model)
        check = ModelCheck(
            model=model,
            revision=revision,
            num_samples=samples,
            seed=seed,
            max_tokens=max_tokens,
            trust_remote_code=trust_remote_code,
        )
    else:
        refuse_idle(context, _MODEL_OPTIONS, without="without --model")
    if path.startswith("hf://"):
        refuse_idle(context, ("workers", "quick"), without="on a dataset on the Hub")
    _check_report(path, check, write_report=write_report)
    with console.progress("verify") as progress:
        report = _report(path, progress, _Depth(workers=workers, quick=quick, deep=deep))
        numbers = _numbers(Path(path), check, progress, write_report=write_report) if not report.faults else None
    if json:
        console.print_json(
            encode(report) if check is None else {**encode(report), "model": numbers and encode(numbers)}
        )
    else:
        _show(report)
        if numbers is not None:
            show_numbers(numbers)
    if report.faults or (numbers is not None and numbers.faults):
        raise typer.Exit(1)


def _show(report: VerifyReport) -> None:
    for fault in report.faults[:_MOST_LINES]:
        console.say(f"fault: {fault}")
    more = f", of which {_MOST_LINES} are shown (all with --json)" if len(report.faults) > _MOST_LINES else ""
    console.out(
        f"{report.path}: {counted(report.num_samples, 'sample')}, {counted(report.num_tokens, 'token')}, "
        f"{format_size(report.size_bytes)} in {counted(report.num_files, 'file')}: "
        f"{counted(len(report.faults), 'fault')}{more}"
    )
    if report.only_remote:
        place, _, first = report.only_remote[0].partition(": ")
        check = f"check them with: eaglehs verify {place}"
        waiting = f"their push to {place} has not ended: run the same `eaglehs extract --push` again"
        console.out(
            f"not read: {counted(len(report.only_remote), 'shard that is', 'shards that are')} only on the Hub, such "
            f"as {first}; {check if place.startswith('hf://') else waiting}"
        )


def _check_report(path: str, check: ModelCheck | None, *, write_report: bool) -> None:
    if write_report and (Path(path) / RUN_FILENAME).exists():
        raise UsageError(f"{path} is a run; --write-report writes into datasets", mend=f"Pack it: eaglehs pack {path}")
    if check is not None and path.startswith("hf://"):
        raise UsageError(
            f"{path} is on the Hub; --model compares local samples", mend="Bring it here first: `hf download`"
        )


def _numbers(path: Path, check: ModelCheck | None, progress: Progress, *, write_report: bool) -> Verified | None:
    """Return what the model says of a few samples; asked once the files are known to be whole."""
    from ..verify_model import keep_verified, verify_model

    if check is None:
        return None
    numbers = verify_model(path, check, progress)
    if write_report:
        keep_verified(path, numbers)
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Depth:
    workers: int | None
    quick: bool
    deep: bool


def _report(path: str, progress: Progress, depth: _Depth) -> VerifyReport:
    from ..builder.hub_address import is_hub_address, parse_hub_address
    from ..builder.verify import verify as verify_path
    from ..builder.worker_count import worker_count

    if is_hub_address(path):
        from ..builder.hub_client import HubClient
        from ..builder.remote_check import verify_remote

        address = parse_hub_address(path)
        return verify_remote(address, HubClient(address.repo, progress=progress), progress, deep=depth.deep)
    if depth.deep:
        raise UsageError(f"{path} is local and always checked in full", mend="Leave --deep out")
    return verify_path(Path(path), progress, workers=worker_count(depth.workers), quick=depth.quick)
