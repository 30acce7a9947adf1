"""`eaglehs push`: a dataset to the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..schemas.counts import counted
from ..schemas.errors import UsageError
from ..schemas.sizes import format_size
from .options import JsonFlag

if TYPE_CHECKING:
    from ..builder.publish import PublishResult
    from ..builder.publish_plan import PlanFacts, PublishPlan

_MOST_LINES = 20
"""Stale files shown to a person; --json has all."""


def push(
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="A folder that `eaglehs pack` wrote.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The dataset's name on the Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    branch: Annotated[str, typer.Option("--branch", help="The branch that will show the dataset.")] = "main",
    license_id: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="License for the card: apache-2.0, cc-by-4.0, other ..."),
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license-name", metavar="NAME", help="What the license `other` is called.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Check every value first, not only sizes and structure.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and change nothing on the Hub.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove files of an earlier layout without asking.")] = False,
    json: JsonFlag = False,
) -> None:
    """Publish a dataset on the Hugging Face Hub: only what is missing there, and never half a dataset to be seen.

    Shards go to a branch of their own first; when all are there, one commit shows the whole dataset, and the Hub's
    listing is compared with the manifest. Stopped at any point, the same command goes on. The token is HF_TOKEN or that
    of `hf auth login`; HF_HUB_DISABLE_XET=1 sends by Git-LFS.

    eaglehs push dataset org/kimi-k25-eagle3-hs --license other --license-name modified-mit --dry-run

    eaglehs push dataset org/kimi-k25-eagle3-hs --private
    """
    from ..builder.hub_address import check_repo_name
    from ..builder.hub_client import HubClient
    from ..builder.publish import publish
    from ..builder.publish_lock import publishing
    from ..builder.publish_plan import PublishSettings, plan_facts, plan_publish
    from ..cards.licenses import CardTerms
    from ..cards.validate import validate_card
    from ..dataset_card import give_terms

    check_repo_name(repo)
    settings = PublishSettings(branch=branch, private=private, verify_all=deep)
    terms = CardTerms(license=license_id or "", license_name=license_name or "")
    with publishing(dataset):
        if terms != CardTerms():
            give_terms(dataset, terms)
        with console.progress("checking") as progress:
            hub = HubClient(repo, progress=progress)
            plan = plan_publish(dataset, hub, settings, progress)
            validate_card(dataset)
        facts = plan_facts(plan, hub, settings)
        if dry_run:
            console.print_json(facts) if json else _show_plan(facts, console.out)
            return
        _show_plan(facts, console.say)
        _allow_removal(plan, is_allowed=yes)  # between two bars: one that moves would wipe the question away
        with console.progress("push") as progress:
            result = publish(plan, HubClient(repo, progress=progress), settings, progress)
    console.print_json(result) if json else _show_result(result)


def _allow_removal(plan: PublishPlan, *, is_allowed: bool) -> None:
    if not plan.stale or is_allowed:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"{counted(len(plan.stale), 'file')} of an earlier layout are on the Hub, such as {plan.stale[0]}",
            why="Stock readers would mix them in",
            mend="Remove them in the same step with --yes; --dry-run lists them",
        )
    if not typer.confirm(f"Remove these {counted(len(plan.stale), 'file')} from the Hub?", err=True):
        raise UsageError("nothing was sent", why="The new dataset can't stand beside the old files")


def _show_plan(facts: PlanFacts, show: Callable[[str], None]) -> None:
    place = f"{facts.repo} ({'private' if facts.is_private else 'public'}{', new' if facts.is_new else ''})"
    folders = ", ".join(f"{count} in {folder}" for folder, count in facts.folders.items())
    show(f"to          {place}, branch {facts.branch}, as {facts.account}")
    show(f"dataset     {counted(facts.num_files, 'file')}, {format_size(facts.size_bytes)}: {folders}")
    show(f"largest     {facts.largest_file}, {format_size(facts.largest_bytes)}")
    show(
        f"there       {counted(facts.num_present, 'file')}; {facts.num_copied:,} more under another name "
        "or from a stopped push"
    )
    show(f"to send     {counted(facts.num_sent, 'file')}, {format_size(facts.sent_bytes)}")
    for name in facts.stale[:_MOST_LINES]:
        show(f"to remove   {name}")
    if len(facts.stale) > _MOST_LINES:
        show(f"to remove   {len(facts.stale) - _MOST_LINES:,} more (all with --json)")


def _show_result(result: PublishResult) -> None:
    if result.is_unchanged:
        console.say(f"{result.repo} has all of it already; nothing was sent")
    removed = f", {counted(len(result.removed), 'old file')} removed" if result.removed else ""
    console.out(
        f"{result.repo}: {counted(result.num_files, 'file')}, {format_size(result.size_bytes)}, of which "
        f"{result.num_sent:,} ({format_size(result.sent_bytes)}) were sent{removed}; compared with the Hub's listing; "
        f"revision {result.revision}"
    )
