"""Which commands there are, in the order of the help text."""

from __future__ import annotations

import importlib

import typer

PASS_ARGUMENTS_ON = {"allow_extra_args": True, "ignore_unknown_options": False}
"""Commands that take SGLang's own arguments after `--`."""

COMMANDS = ("demo", "serve", "extract", "pack", "verify", "inspect", "card")


def register(app: typer.Typer) -> None:
    """Add each command; its module holds a function of the same name."""
    for name in COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        app.command(name)(getattr(module, name))
