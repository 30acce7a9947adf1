"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from ..schemas.errors import UsageError

WEEK_S = 604_800
"""The longest wait that may be asked for: a longer one, or `inf`, is a slip."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]

ModelName = Annotated[str, typer.Option("--model", help="The target model: a folder or a name on the Hub.")]

ModelRevision = Annotated[str | None, typer.Option("--revision", help="Commit or branch of the model.")]

LayerList = Annotated[
    str | None,
    typer.Option(
        "--layers",
        help="States to keep, e.g. 3,31,59: k is the residual stream that enters decoder layer k, 0-based. "
        "Default: the profile's, else 2, n/2, n-3.",
    ),
]

ProfileName = Annotated[
    str | None, typer.Option("--profile", help="Server settings for a model: kimi-k25, cpu, or a TOML file.")
]

SglangPython = Annotated[
    str | None,
    typer.Option(
        "--sglang-python",
        envvar="EAGLEHS_SGLANG_PYTHON",
        help="Python of the environment that has SGLang, if it is another one.",
    ),
]

CodecName = Literal["plain", "planes-zstd"]
"""The names of schemas.states.Codec."""

EngineName = Literal["auto", "sglang", "transformers"]

MaskName = Literal["assistant", "last", "all"]

TrustFlag = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's own Python code run (tokenizer, config, model).")
]

UntestedFlag = Annotated[
    bool, typer.Option("--allow-untested", help="Use a release of SGLang that capture is not known to work with.")
]


def choice(flag: str, words: Any, *, text: str) -> Any:
    """Return the option `flag` with the help `text`, which takes one of the `words` of a Literal.

    Parsed here, because typer (0.29) lets pydantic write "Value error, " before the words of a refusal.
    """
    known = get_args(words)

    def parse(given: str) -> str:
        if given not in known:
            raise typer.BadParameter(f"{given!r} is not one of {', '.join(map(repr, known))}.")
        return given

    return typer.Option(flag, parser=parse, metavar=f"<{'|'.join(known)}>", help=text)


def refuse_idle(context: typer.Context, names: tuple[str, ...], *, without: str) -> None:
    """Refuse options that stand on the command line and have no effect there; those of eaglehs.toml may wait.

    Raises:
        UsageError: the first of `names` that is given.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} has no effect {without}", mend="Leave it out, or give what it needs")


def refuse_local_revision(context: typer.Context, model: str) -> None:
    """Refuse --revision for a model in a local folder, which is what it is.

    Raises:
        UsageError: it is given.
    """
    if model and Path(model).expanduser().is_dir():
        refuse_idle(context, ("revision",), without="on a model in a local folder")


def sglang_arguments(context: typer.Context) -> tuple[str, ...]:
    """Return what stands after `--`.

    Raises:
        typer.BadParameter: it begins with a word that is no flag: an argument that the command itself does not have.
    """
    if context.args and not context.args[0].startswith("-"):
        raise typer.BadParameter(f"unexpected argument {context.args[0]!r}; SGLang's own go after --")
    return tuple(context.args)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the numbers of a comma-separated list, or None where none is given.

    Raises:
        UsageError: something in the list is no number.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--layers {text!r} is not a list of numbers such as 3,31,59") from None
