"""`eaglehs serve`: a patched SGLang server in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from ..schemas.progress import Silent
from .options import (
    WEEK_S,
    JsonFlag,
    LayerList,
    ModelName,
    ModelRevision,
    ProfileName,
    SglangPython,
    TrustFlag,
    UntestedFlag,
    parse_layers,
    refuse_local_revision,
    sglang_arguments,
)


class _Notes(Silent):
    """Progress as lines; a bar would be torn by the server's own output."""

    def note(self, message: str) -> None:
        console.say(f"eaglehs: {message}")


def serve(
    context: typer.Context,
    model: ModelName,
    layers: LayerList = None,
    profile: ProfileName = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1. Default: one that is free.")
    ] = None,
    dump_dir: Annotated[
        Path | None,
        typer.Option("--dump-dir", help="Where dumps go. Default: the profile's, else eaglehs in shared memory."),
    ] = None,
    revision: ModelRevision = None,
    sglang_python: SglangPython = None,
    start_timeout: Annotated[
        float,
        typer.Option("--start-timeout", min=1, max=WEEK_S, help="Seconds from the start to the first generated token."),
    ] = 1800.0,
    trust_remote_code: TrustFlag = False,
    allow_untested: UntestedFlag = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the command and its environment, without secrets; start nothing.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Run an SGLang server that dumps states, until Ctrl-C; `extract --server URL` then uses it for any run.

    What stands after -- goes to SGLang. Arguments that would spoil the capture are refused.

    eaglehs serve --model moonshotai/Kimi-K2.5 --profile kimi-k25 --port 30000

    eaglehs serve --model ./tiny --layers 2,4,5 --print -- --tp-size 2
    """
    from ..extraction.serve import ServeOptions, show_command
    from ..extraction.serve import serve as run_serve

    if json and not print_only:
        raise typer.BadParameter("--json goes with --print")
    refuse_local_revision(context, model)
    options = ServeOptions(
        model=model,
        revision=revision,
        layers=parse_layers(layers),
        profile=profile,
        port=port,
        dump_dir=dump_dir,
        sglang_python=sglang_python,
        sglang_args=sglang_arguments(context),
        trust_remote_code=trust_remote_code,
        allow_untested=allow_untested,
        start_timeout_s=start_timeout,
    )
    if not print_only:
        run_serve(options, _Notes())
        return
    command = show_command(options)
    if json:
        console.print_json({"command": list(command.shown_argv), "environment": command.shown_environment})
    else:
        console.out(command.shell_line())
