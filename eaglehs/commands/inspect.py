"""`eaglehs inspect`: what is in a run or a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..schemas.sizes import format_size
from .options import JsonFlag

if TYPE_CHECKING:
    from ..builder.inspect import Overview, SampleView


def inspect(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A run or a dataset.")] = Path("dataset"),
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="One sample, by its key or your id.")] = None,
    json: JsonFlag = False,
) -> None:
    """Show what is in a run or a dataset: counts, layers, lengths, sizes; or one sample and where it lies.

    eaglehs inspect dataset

    eaglehs inspect run conversation-17 --json
    """
    from ..builder.inspect import inspect_path, inspect_sample

    if key is None:
        overview = inspect_path(path)
        console.print_json(overview) if json else _show(_overview_lines(overview))
    else:
        sample = inspect_sample(path, key)
        console.print_json(sample) if json else _show(_sample_lines(sample))


def _show(lines: list[tuple[str, str]]) -> None:
    for name, value in lines:
        if value:
            console.out(f"{name:<14}{value}")


def _overview_lines(found: Overview) -> list[tuple[str, str]]:
    model, lengths = found.model, found.lengths
    share = f"{100 * found.num_trainable / found.num_tokens:.1f} %" if found.num_tokens else "0 %"
    return [
        (found.kind, found.path),
        ("model", f"{model.name} @ {model.revision[:12]} ({model.architecture}, {model.num_layers} layers)"),
        ("states", f"{', '.join(map(str, found.layers))} ({found.capture}) and final, width {model.hidden_size}, bf16"),
        ("engine", f"{found.engine}, run {found.run_id} of {found.created_at}"),
        ("samples", f"{found.num_samples:,} of {found.num_planned:,} prompts"),
        ("tokens", f"{found.num_tokens:,}, {found.num_trainable:,} trained on ({share})"),
        ("lengths", f"{lengths.shortest} to {lengths.longest}, median {lengths.median}" if lengths else ""),
        ("size", f"{format_size(found.size_bytes)} in {found.num_files:,} files"),
        ("norms", _norms(found.state_norms)),
        ("failed", "; ".join(f"{count} x {reason}" for reason, count in found.failed.items())),
    ]


def _sample_lines(found: SampleView) -> list[tuple[str, str]]:
    return [
        ("sample", f"{found.key} (id {found.id}) of {found.path}"),
        ("source", found.source),
        ("status", f"{found.status} {found.reason}".strip()),
        ("tokens", f"{found.num_tokens:,}, {found.num_trainable:,} trained on; the engine's next: {found.next_token}"),
        ("shard", found.shard),
        *((name, f"{place.length:,} bytes at {place.offset:,}") for name, place in found.arrays.items()),
        *(("dump", f"{dump.name}, {dump.size_bytes:,} bytes") for dump in found.dumps),
        ("norms", _norms(found.state_norms)),
    ]


def _norms(norms: dict[str, float]) -> str:
    """Return the norms from the first layer to the last, then `final`."""
    ordered = sorted(norms, key=lambda state: (not state.startswith("layer_"), len(state), state))
    return ", ".join(f"{state} {norms[state]:.3g}" for state in ordered)
