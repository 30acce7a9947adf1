"""`eaglehs inspect`: what is in a run or a dataset."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..schemas.counts import counted
from ..schemas.keys import shown_id
from ..schemas.sizes import format_size
from .options import JsonFlag

if TYPE_CHECKING:
    from ..builder.inspect import Overview, SampleView
    from ..schemas.index import ArrayPlace


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="A run, a dataset, or hf://datasets/org/name[@revision].")
    ] = "dataset",
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="One sample, by its key or your id.")] = None,
    json: JsonFlag = False,
) -> None:
    """Show what is in a run or a dataset: counts, layers, lengths, sizes; or one sample and where it lies.

    eaglehs inspect dataset

    eaglehs inspect run conversation-17 --json

    eaglehs inspect hf://datasets/org/name
    """
    from ..builder.inspect import inspect_path, inspect_sample

    folder, shown = _place(path)
    if key is None:
        overview = dataclasses.replace(inspect_path(folder), path=shown)
        console.print_json(overview) if json else _show(_overview_lines(overview))
    else:
        sample = dataclasses.replace(inspect_sample(folder, key), path=shown)
        console.print_json(sample) if json else _show(_sample_lines(sample))


def _place(path: str) -> tuple[Path, str]:
    """Return the folder to look into, and the name to show; of a dataset on the Hub, manifest and index are fetched."""
    from ..builder.hub_address import is_hub_address, parse_hub_address

    if not is_hub_address(path):
        return Path(path), path
    from ..builder.hub_client import HubClient
    from ..builder.remote_check import remote_heads

    address = parse_hub_address(path)
    folder, pinned = remote_heads(address, HubClient(address.repo))
    return folder, str(pinned)


def _show(lines: list[tuple[str, str]]) -> None:
    for name, value in lines:
        if value:
            console.out(f"{name:<14}{value}")


def _overview_lines(found: Overview) -> list[tuple[str, str]]:
    model, lengths = found.model, found.lengths
    share = f"{100 * found.num_trainable / found.num_tokens:.1f} %" if found.num_tokens else "0 %"
    return [
        (found.kind, found.path),
        ("model", f"{model.name} @ {model.revision[:12]} ({model.architecture}, {counted(model.num_layers, 'layer')})"),
        ("states", f"{', '.join(map(str, found.layers))} ({found.capture}) and final, width {model.hidden_size}, bf16"),
        ("codec", "" if found.codec == "plain" else str(found.codec)),
        ("engine", f"{found.engine}, run {found.run_id} of {found.created_at}"),
        ("samples", f"{found.num_samples:,} of {counted(found.num_planned, 'prompt')}"),
        ("tokens", f"{found.num_tokens:,}, {found.num_trainable:,} trained on ({share})"),
        ("lengths", f"{lengths.shortest} to {lengths.longest}, median {lengths.median}" if lengths else ""),
        ("size", f"{format_size(found.size_bytes)} in {counted(found.num_files, 'file')}"),
        ("on the Hub", found.on_hub),
        ("norms", _norms(found.state_norms)),
        ("failed", _reasons(found.failed)),
        ("skipped", _reasons(found.skipped)),
    ]


def _sample_lines(found: SampleView) -> list[tuple[str, str]]:
    return [
        ("sample", f"{found.key} (id {shown_id(found.id)}) of {found.path}"),
        ("source", found.source),
        ("status", f"{found.status} {found.reason}".strip()),
        ("tokens", f"{found.num_tokens:,}, {found.num_trainable:,} trained on; the engine's next: {found.next_token}"),
        ("shard", found.shard),
        *((name, _place_text(place)) for name, place in found.arrays.items()),
        *(("dump", f"{dump.name}, {counted(dump.size_bytes, 'byte')}") for dump in found.dumps),
        ("norms", _norms(found.state_norms)),
    ]


def _place_text(place: ArrayPlace) -> str:
    text = f"{counted(place.stored_bytes, 'byte')} at {place.offset:,}"
    return text if place.coded is None else f"{text}, {place.coded.codec} of {place.length:,}"


def _reasons(counts: dict[str, int]) -> str:
    return "; ".join(f"{count:,} x {reason}" for reason, count in counts.items())


def _norms(norms: dict[str, float]) -> str:
    """Return the norms from the first layer to the last, then `final`."""
    ordered = sorted(norms, key=lambda state: (not state.startswith("layer_"), len(state), state))
    return ", ".join(f"{state} {norms[state]:.3g}" for state in ordered)
