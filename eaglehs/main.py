"""The command `eaglehs`: its commands, their defaults from eaglehs.toml, and the border where errors become text."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__, console
from .__main__ import INTERRUPTED
from .refused_paths import refused_path
from .schemas.errors import EaglehsError, UsageError

CONFIG_FILENAME = "eaglehs.toml"

app = typer.Typer(
    name="eaglehs",
    help="Hidden-state datasets for EAGLE-3 drafters: extract, pack, verify, stream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        console.out(f"eaglehs {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hidden-state datasets for EAGLE-3 drafters: extract, pack, verify, stream."""
    context.default_map = read_defaults(Path(CONFIG_FILENAME))


def read_defaults(path: Path) -> dict[str, Any]:
    """Return the options that eaglehs.toml sets, by command; flags win over them.

    Raises:
        UsageError: the file is no TOML, or names a command or option that does not exist.
    """
    if not path.exists():
        return {}
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise UsageError(f"{path} can't be read: {fault}") from None
    known = {name: {p.name: p for p in command.params} for name, command in _commands().items()}
    for command, options in settings.items():
        if command not in known or not isinstance(options, dict):
            raise UsageError(f"{path}: [{command}] is no command of eaglehs; there are {', '.join(sorted(known))}")
        for option in options:
            if option.replace("-", "_") not in known[command]:
                raise UsageError(f"{path}: [{command}] has no option {option!r}")
    return {
        command: {
            name: [value] if known[command][name].multiple and isinstance(value, str) else value
            for name, value in ((option.replace("-", "_"), value) for option, value in options.items())
        }
        for command, options in settings.items()
    }


def _commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def run() -> tuple[str, int]:
    """Run the command; return the last message for stderr, if there is one, and the exit code."""
    try:
        with console.told_output():
            return _run()
    except console.OutputError as error:  # what was held back until the end
        return f"error: {error}", error.exit_code


def _run() -> tuple[str, int]:
    try:
        from .commands import registry

        registry.register(app)
        app(prog_name="eaglehs")
    except EaglehsError as error:
        return f"error: {error}", error.exit_code
    except OSError as fault:  # of these only what is plainly the user's path or disk; the rest is a bug
        if (refused := refused_path(fault)) is None:
            raise
        return f"error: {refused}", refused.exit_code
    except SystemExit as end:  # how typer ends a command, one after Ctrl-C, too
        exit_code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        return "interrupted" if exit_code == INTERRUPTED else "", exit_code
    return "", 0
