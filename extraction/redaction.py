"""Secrets out of everything that is kept or shown: one list of names, used for commands, environments and logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

HIDDEN = "***"

SECRET_FLAGS = frozenset(
    {"--api-key", "--admin-api-key", "--ssl-keyfile-password", "--watermark-key", "--watermark-key-b"}
)
"""Flags of SGLang whose value is a secret; SGLang itself prints them in its log and tells them in /server_info."""

_SECRET_WORDS = frozenset({"KEY", "APIKEY", "CREDENTIALS"})
_SECRET_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE")

_MIN_SECRET_CHARS = 4
"""A shorter value is no secret worth the name, and to blot it out would make a log unreadable."""


def is_secret_name(name: str) -> bool:
    """Tell whether an environment variable of this name holds a secret (HF_TOKEN does, TOKENIZERS_PARALLELISM not)."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


def redact_command(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with the value of each secret flag hidden, in `--flag value` and `--flag=value` form."""
    shown: list[str] = []
    for argument, secret in zip(argv, _secrets_in(argv), strict=True):
        shown.append(argument if secret is None else argument[: len(argument) - len(secret)] + HIDDEN)
    return tuple(shown)


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the value of each secret variable hidden."""
    return {name: HIDDEN if is_secret_name(name) else value for name, value in environment.items()}


def secret_values(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that must not be seen in a log, longest first, so that none is left as part of another."""
    found = {*filter(None, _secrets_in(argv)), *(value for name, value in environment.items() if is_secret_name(name))}
    return tuple(sorted((value for value in found if len(value) >= _MIN_SECRET_CHARS), key=len, reverse=True))


def _secrets_in(argv: Sequence[str]) -> Iterator[str | None]:
    """Yield for each argument the secret that it ends with, or None."""
    is_value = False
    for argument in argv:
        flag, has_value, value = argument.partition("=")
        if is_value:
            yield argument
        else:
            yield value if has_value and _is_secret_flag(flag) else None
        is_value = not is_value and not has_value and _is_secret_flag(flag)


def _is_secret_flag(flag: str) -> bool:
    # argparse takes abbreviations too: --api-k is --api-key
    return flag in SECRET_FLAGS or (len(flag) >= len("--api") and "--api-key".startswith(flag))
