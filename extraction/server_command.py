"""The command line and environment of a patched SGLang server, made of typed settings; nothing is started here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.errors import UsageError
from . import redaction
from .capture_rules import parse_arguments, violations_in_arguments
from .capture_settings import DEFAULT_RID_PREFIX, CaptureSettings
from .profile import Profile

PLUGIN_NAME = "eaglehs"
"""Name of our entry point in SGLang's plugin group; `SGLANG_PLUGINS`, where set, must list it."""

GRAPH_BACKENDS_SINCE = (0, 5, 14)
"""The first SGLang version with one graph backend for each phase; older ones have two switches."""

NO_FUSION = "--enforce-disable-flashinfer-allreduce-fusion"
"""SGLang turns the fusion on by itself for DeepSeek, Kimi-K2.5 and others under --tp-size: see capture_rules.py."""

NO_WARMUP = "--skip-server-warmup"
"""SGLang's own first request comes a second after the server answers others, so it would share a batch with our first
samples: another batch, other bf16 noise. The trial request (extraction/trial.py) warms up what they need."""

_OURS = {
    "--model-path": "--model",
    "--model": "--model",
    "--revision": "--revision",
    "--host": "the default",
    "--port": "--port",
    "--trust-remote-code": "--trust-remote-code",
}
"""Flags of SGLang that eaglehs sets itself -> what to use for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything about a server that eaglehs starts."""

    model: str
    layers: tuple[int, ...]
    dump_dir: Path
    rid_prefix: str = DEFAULT_RID_PREFIX
    """Only requests whose id starts so are captured; the default is any run's."""

    revision: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    """None: one that is free."""

    profile: Profile = field(default_factory=Profile)
    extra_args: tuple[str, ...] = ()
    """The user's own SGLang arguments; they come last and so win over the profile's."""

    sglang_python: str = sys.executable
    trust_remote_code: bool = False
    allow_untested: bool = False
    """Start a release of SGLang that is not known to work."""

    is_bounded: bool = False
    """See `Expected` of extraction/server_checks.py."""

    log: Path | None = None
    """Where the server's output goes; None: stderr."""

    start_timeout_s: float = 1800.0
    """From the start to the first generated token; a model of 1 TB takes about ten minutes."""

    stop_grace_s: float = 20.0
    """From TERM to KILL."""


class ContradictingArgumentError(UsageError):
    """An SGLang argument of the user's would make capture wrong, or is one that eaglehs sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started."""

    argv: tuple[str, ...]
    """May hold an API key: show `shown_argv`."""

    environment: Mapping[str, str]
    """The variables that are added to or changed in our own environment."""

    @property
    def shown_argv(self) -> tuple[str, ...]:
        """The command line without secrets, for run.json and the terminal."""
        return redaction.redact_command(self.argv)

    @property
    def shown_environment(self) -> dict[str, str]:
        """The added variables without secrets."""
        return redaction.redact_environment(self.environment)

    @property
    def full_environment(self) -> dict[str, str]:
        """All variables of the server's process."""
        return {**os.environ, **self.environment}

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must not be seen in the server's log."""
        return redaction.secret_values(self.argv, self.full_environment)

    @property
    def api_key(self) -> str | None:
        """The key that requests to this server need."""
        given = [value for flag, value in parse_arguments(self.argv) if flag == "--api-key" and isinstance(value, str)]
        return given[-1] if given else None

    def shell_line(self) -> str:
        """Return the command as one line for a shell, without secrets."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.shown_environment.items())]
        return " ".join(("env", *variables, shlex.join(self.shown_argv)))


def build_command(
    settings: ServerSettings, *, port: int, version: tuple[int, ...] | None = None, plugin_site: Path | None = None
) -> ServerCommand:
    """Return how to start the server that `settings` describe.

    `version` is SGLang's, None where unknown: then the newest is assumed. `plugin_site` is a folder for PYTHONPATH
    that brings the plugin into an environment without eaglehs.

    Raises:
        ContradictingArgumentError: an extra argument would make capture wrong; it is named, with the reason.
    """
    check_arguments((*settings.profile.server.args, *settings.extra_args))
    argv = [settings.sglang_python, "-m", "sglang.launch_server", "--model-path", settings.model]
    if settings.revision is not None:
        argv += ["--revision", settings.revision]
    if settings.trust_remote_code:
        argv.append("--trust-remote-code")
    argv += ["--host", settings.host, "--port", str(port), "--skip-tokenizer-init", "--disable-radix-cache"]
    argv += [*_graphs_off(version), NO_FUSION, NO_WARMUP]
    argv += [*settings.profile.server.arguments(), *settings.extra_args]
    return ServerCommand(argv=tuple(argv), environment=_environment(settings, plugin_site))


def check_arguments(arguments: tuple[str, ...]) -> None:
    """Refuse SGLang arguments that would make capture wrong.

    Raises:
        ContradictingArgumentError: the first such argument, why it is refused, and what to do.
    """
    for flag, _ in parse_arguments(arguments):
        if flag in _OURS:
            raise ContradictingArgumentError(
                f"{flag} can't be given to SGLang directly", why="eaglehs sets it", mend=f"Use {_OURS[flag]} instead"
            )
    for violation in violations_in_arguments(arguments):
        raise ContradictingArgumentError(
            f"{violation.found} ({violation.rule.name}) can't be used to capture states",
            why=violation.rule.why,
            mend=violation.rule.mend,
        )


def _graphs_off(version: tuple[int, ...] | None) -> list[str]:
    if version and version < GRAPH_BACKENDS_SINCE:
        return ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"]
    return ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]


def _environment(settings: ServerSettings, plugin_site: Path | None) -> dict[str, str]:
    capture = CaptureSettings(
        dump_dir=settings.dump_dir.absolute(), layers=settings.layers, rid_prefix=settings.rid_prefix
    )
    environment = {
        **settings.profile.environment,
        **capture.to_environment(),
        # `python -m` puts the working folder first on the path: a folder there called eaglehs or datasets, as in a
        # clone of this repository, would be imported in place of the package.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",  # a server that crashes must not take its last words with it
    }
    if plugin_site is not None:
        others = environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(plugin_site), others)))
    chosen = environment.get("SGLANG_PLUGINS") or os.environ.get("SGLANG_PLUGINS", "")
    if chosen and PLUGIN_NAME not in [name.strip() for name in chosen.split(",")]:
        environment["SGLANG_PLUGINS"] = f"{chosen},{PLUGIN_NAME}"
    return environment
