"""From what a user asks for to a server's settings, and a server in the foreground.

Precedence: the command's own options, SGLang arguments after `--`, the profile, defaults.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ..schemas.errors import EngineError, UsageError
from ..schemas.progress import Progress
from ..schemas.states import check_layers, default_layers
from .dump_folder import default_dump_dir
from .model_facts import is_commit, read_model_facts
from .profile import Profile, load_profile
from .server import ServerDiedError, managed_server
from .server_command import ServerCommand, ServerSettings, build_command
from .server_environment import find_plugin_site, find_sglang_version
from .sglang_versions import parse_version

DEFAULT_PORT = 30000
"""SGLang's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a user says about a server; None takes the profile's or the default."""

    model: str
    revision: str | None = None
    layers: tuple[int, ...] | None = None
    profile: str | None = None
    port: int | None = None
    dump_dir: Path | None = None
    sglang_python: str | None = None
    sglang_args: tuple[str, ...] = ()
    trust_remote_code: bool = False
    allow_untested: bool = False
    start_timeout_s: float = 1800.0


def resolve_settings(options: ServeOptions) -> ServerSettings:
    """Return the settings of a server for any run, with its output on stderr; the layers are not checked yet.

    Raises:
        UsageError, DataError, StorageError: no such profile, or no layers are named and the model can't be read.
    """
    profile = Profile() if options.profile is None else load_profile(options.profile)
    layers = options.layers or profile.layers
    if not layers:
        facts = read_model_facts(options.model, revision=options.revision)
        layers = default_layers(facts.num_layers)
    dump_dir = options.dump_dir or (Path(profile.dump_dir) if profile.dump_dir else default_dump_dir())
    return ServerSettings(
        model=options.model,
        revision=options.revision,
        layers=tuple(sorted(layers)),
        port=options.port,
        profile=profile,
        dump_dir=dump_dir,
        sglang_python=options.sglang_python or sys.executable,
        extra_args=options.sglang_args,
        trust_remote_code=options.trust_remote_code,
        allow_untested=options.allow_untested,
        start_timeout_s=options.start_timeout_s,
    )


def show_command(options: ServeOptions) -> ServerCommand:
    """Return how `serve` would start the server; works where neither SGLang nor the model is.

    Raises:
        UsageError: an argument contradicts capture, or there is no such profile.
    """
    settings = resolve_settings(options)
    try:
        version = parse_version(find_sglang_version(settings.sglang_python, allow_untested=settings.allow_untested))
    except (UsageError, EngineError):
        version = None  # it is meant for another machine
    site = find_plugin_site(settings.sglang_python)
    return build_command(settings, port=settings.port or DEFAULT_PORT, version=version, plugin_site=site)


def serve(options: ServeOptions, progress: Progress) -> None:
    """Run a patched server in the foreground until it ends or Ctrl-C.

    Raises:
        UsageError: nothing was started, see `managed_server`.
        EngineError: it did not come up, would not capture right, or has ended by itself.
    """
    settings = resolve_settings(options)
    facts = read_model_facts(settings.model, revision=settings.revision)
    check_layers(settings.layers, facts.num_layers)
    if is_commit(facts.revision):  # a branch may move; and runs compare the server's commit with their own
        settings = replace(settings, revision=facts.revision)
    with managed_server(settings, progress) as server:
        layers = ",".join(map(str, settings.layers))
        progress.note(
            f"ready at {server.url}, capturing layers {layers} into {settings.dump_dir}. Use it with: "
            f"eaglehs extract --server {server.url} --dump-dir {settings.dump_dir} --model {settings.model} "
            f"{f'--revision {options.revision} ' if options.revision else ''}--layers {layers} --prompts ..."
        )
        raise ServerDiedError(server.wait(), None, "")
