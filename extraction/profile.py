"""Profiles: server settings for one model on one kind of machine, as a strict TOML file.

    description = "..."                    what it is for
    layers = [3, 31, 59]                   layers to capture where the command names none
    dump_dir = "/dev/shm/eaglehs"          dump folder where the command names none

    [server]                               one key a setting, see `ServerFlags`; `args` takes any other SGLang argument
    tp_size = 8

    [environment]                          variables for the server
    NCCL_PROTO = "LL"

An unknown key is an error. Precedence: the command's own options, then SGLang arguments after `--`, then the profile.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas import codec
from ..schemas.errors import RecordError, UsageError
from .capture_settings import DUMP_DIR, LAYERS, RID_PREFIX

SHIPPED = Path(__file__).parent / "profiles"

RESERVED_ENVIRONMENT = (DUMP_DIR, LAYERS, RID_PREFIX)
"""Variables that must agree with the run; only the command sets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """SGLang settings of a profile; None leaves SGLang's own default."""

    tp_size: int | None = None
    mem_fraction_static: float | None = None
    attention_backend: str | None = None
    device: str | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    disable_custom_all_reduce: bool = False
    args: tuple[str, ...] = ()
    """Further arguments, as on the command line."""

    def arguments(self) -> tuple[str, ...]:
        """Return the settings as SGLang's command-line arguments."""
        values = {
            "--tp-size": self.tp_size,
            "--mem-fraction-static": self.mem_fraction_static,
            "--attention-backend": self.attention_backend,
            "--device": self.device,
            "--max-total-tokens": self.max_total_tokens,
            "--chunked-prefill-size": self.chunked_prefill_size,
        }
        given = tuple(text for flag, value in values.items() if value is not None for text in (flag, str(value)))
        switches = ("--disable-custom-all-reduce",) if self.disable_custom_all_reduce else ()
        return (*given, *switches, *self.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The contents of a profile file."""

    description: str = ""
    layers: tuple[int, ...] = ()
    dump_dir: str | None = None
    server: ServerFlags = field(default_factory=ServerFlags)
    environment: dict[str, str] = field(default_factory=dict)


class ProfileError(UsageError):
    """A profile does not exist or holds something that can't be used."""


def load_profile(name: str) -> Profile:
    """Return a shipped profile by name (`kimi-k25`), or one from a file (`path/to/mine.toml`).

    Raises:
        ProfileError: no such profile or file, no TOML, an unknown key, or a value that can't be.
    """
    path = Path(name) if name.endswith(".toml") or "/" in name else SHIPPED / f"{name}.toml"
    if not path.is_file():
        raise ProfileError(
            f"there is no profile {name!r}",
            mend=f"Give one of {', '.join(shipped_profiles())}, or the path of a .toml file",
        )
    try:
        profile = codec.decode(Profile, tomllib.loads(path.read_text(encoding="utf-8")), where=str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise ProfileError(f"{path} is not TOML: {fault}") from None
    except RecordError as fault:
        raise ProfileError(str(fault)) from None
    _check_values(profile, path)
    return profile


def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with eaglehs."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def _check_values(profile: Profile, path: Path) -> None:
    server = profile.server
    if server.tp_size is not None and server.tp_size < 1:
        raise ProfileError(f"{path}: server.tp_size is {server.tp_size}, expected 1 or more")
    if server.mem_fraction_static is not None and not 0 < server.mem_fraction_static < 1:
        raise ProfileError(f"{path}: server.mem_fraction_static is {server.mem_fraction_static}, expected 0 to 1")
    for name in profile.environment:
        if name in RESERVED_ENVIRONMENT:
            raise ProfileError(
                f"{path}: environment.{name} can't be set by a profile",
                why="It must agree with the run",
                mend="Use `layers` and `dump_dir` of the profile, or --layers and --dump-dir",
            )
