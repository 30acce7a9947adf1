"""Which commands there are, in the order of the help text."""

from __future__ import annotations

import importlib

import typer

COMMANDS = ("demo", "doctor", "serve", "extract", "pack", "push", "verify", "inspect", "report", "card")

TAKES_SGLANG_ARGUMENTS = {name: {"allow_extra_args": True} for name in ("serve", "extract")}
"""Commands that hand on what stands after `--`."""


def register(app: typer.Typer) -> None:
    """Add each command; its module holds a function of the same name."""
    for name in COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        app.command(name, context_settings=TAKES_SGLANG_ARGUMENTS.get(name))(getattr(module, name))
