"""`eaglehs doctor`: what is installed, what the machine has, and what would stop a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..schemas.sizes import format_size
from .options import JsonFlag, SglangPython

if TYPE_CHECKING:
    from ..doctor import Diagnosis


def doctor(
    out: Annotated[Path, typer.Option("--out", help="Folder of the run that is meant.")] = Path("run"),
    dump_dir: Annotated[
        Path | None, typer.Option("--dump-dir", help="Where the server would dump. Default: as extract.")
    ] = None,
    sglang_python: SglangPython = None,
    json: JsonFlag = False,
) -> None:
    """Tell what is installed, which versions, GPU, shared memory and free space; exit with 1 if a run would be stopped.

    `extract --dry-run` goes on from here: it reckons with your prompts and model.

    eaglehs doctor

    eaglehs doctor --dump-dir /mnt/fast/spool --json
    """
    from ..doctor import Where, diagnose

    found = diagnose(Where(out=out, dump_dir=dump_dir, sglang_python=sglang_python))
    console.print_json(found) if json else console.out("\n".join(_lines(found)))
    if found.faults:
        raise typer.Exit(1)


def _lines(found: Diagnosis) -> Iterator[str]:
    yield f"eaglehs    {found.eaglehs}, Python {found.python}"
    yield f"system     {found.system}"
    packages = (f"{name} {version or 'missing'}" for name, version in found.packages.items())
    yield f"packages   {', '.join(packages)}"
    yield from (f"gpu        {gpu}" for gpu in found.gpus or ("none is visible",))
    sglang = found.sglang
    known = "supported" if sglang.is_supported else "not supported"
    yield f"sglang     {f'{sglang.version}, {known}' if sglang.version else 'not found'} ({sglang.python})"
    yield f"engine     auto is {found.engine}: {found.engine_reason}"
    for folder in found.folders:
        free, total = format_size(folder.free_bytes), format_size(folder.total_bytes)
        can = "" if folder.is_writable else ", not writable"
        yield f"{folder.use:<10} {folder.path}: {free} of {total} free{can}"
    yield f"files      {found.file_limit:,} may be open at once"
    yield from (f"warning: {warning}" for warning in found.warnings)
    yield from (f"would stop a run: {fault}" for fault in found.faults)
    if not found.faults:
        yield "nothing here would stop a run"
