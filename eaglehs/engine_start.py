"""From engine settings to a started engine: our own server, a running one, or transformers in this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .schemas.dump import rid_prefix
from .schemas.errors import UsageError
from .schemas.progress import Progress
from .schemas.run import RunFolder, RunRecord
from .server_addresses import ServerAddress, parse_servers

if TYPE_CHECKING:
    from .extraction.engines.protocol import Engine
    from .extraction.engines.sglang import SglangEngine
    from .extraction.serve import ServeOptions
    from .extraction.server import Server
    from .extraction.server_checks import Expected

DETERMINISTIC = "--enable-deterministic-inference"
"""SGLang's switch; it needs an attention backend that has such kernels (flashinfer, fa3, triton)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Which engine to use and how to reach or start it."""

    name: str = "auto"
    """`auto`, `sglang` or `transformers`."""

    concurrency: int | None = None
    """Requests under way at once at a server; None: the engine's default."""

    dump_dir: Path | None = None
    """The spool; None: a folder under /dev/shm for a server, inside the run for the transformers engine."""

    servers: tuple[str, ...] = ()
    """Running patched servers, `URL` or `URL=DUMPDIR` (server_addresses.py); empty: start one."""

    profile: str | None = None
    port: int | None = None
    sglang_python: str | None = None
    sglang_args: tuple[str, ...] = ()
    deterministic: bool = False
    """Ask a server of ours for SGLang's deterministic inference: the same rows whatever else is in the batch."""
    start_timeout_s: float = 1800.0
    stall_timeout_s: float = 600.0
    """Without an answer or a dump for so long, a server hangs."""

    max_restarts: int = 3
    """Times that a server of ours is started again after it died or hung."""

    trust_remote_code: bool = False
    allow_untested: bool = False
    """Use a release of SGLang that is not known to work."""


def pick_engine(settings: EngineSettings) -> tuple[str, str]:
    """Return the engine's name and the reason for it.

    Raises:
        UsageError: no such engine, or options of one engine are given for the other.
    """
    from .extraction.engines.choose import SGLANG, TRANSFORMERS, choose_engine

    if settings.servers and settings.name == TRANSFORMERS:
        raise UsageError("--server needs the sglang engine, but --engine transformers is given")
    if settings.servers:
        engine, reason = SGLANG, "--server is given"
    else:
        engine, reason = choose_engine(settings.name, settings.sglang_python)
    if engine == TRANSFORMERS:
        _refuse_server_options(settings, reason)
    elif settings.servers:
        _refuse_start_options(settings)
        parse_servers(settings.servers, settings.dump_dir)
    return engine, reason


def starts_server(settings: EngineSettings, engine: str) -> bool:
    """Tell whether `engine` is a server that we start, and so may start again."""
    from .extraction.engines.choose import SGLANG

    return engine == SGLANG and not settings.servers


@contextmanager
def open_engine(settings: EngineSettings, record: RunRecord, folder: RunFolder, progress: Progress) -> Iterator[Engine]:
    """Start the engine of a run, yield it ready, and stop what was started.

    Raises:
        EngineError: it did not start, or would not capture right.
    """
    engine, reason = pick_engine(settings)
    progress.note(f"engine {engine}: {reason}")
    if engine == "transformers":
        with _transformers(settings, record, folder) as started:
            yield started
    elif settings.servers:
        with _attached(settings, record, progress) as started:
            yield started
    else:
        with _managed(settings, record, folder, progress) as started:
            yield started


@contextmanager
def _transformers(settings: EngineSettings, record: RunRecord, folder: RunFolder) -> Iterator[Engine]:
    from .extraction.dump_folder import clean_after
    from .extraction.engines.transformers import TransformersEngine, TransformersSettings

    spool, prefix = spool_of(settings, folder), rid_prefix(record.run_id)
    shutil.rmtree(folder.root / ".spool", ignore_errors=True)  # left by a start that was killed
    clean_after(spool, prefix)  # the same, where --dump-dir is given
    engine = TransformersEngine(
        TransformersSettings(
            model=record.model.name,
            revision=record.model.hub_revision,
            layers=record.layers,
            spool=spool,
            trust_remote_code=settings.trust_remote_code,
        )
    )
    try:
        yield engine
    finally:
        engine.close()  # a prompt that was interrupted may still be writing
        with suppress(OSError):
            clean_after(spool, prefix)
        shutil.rmtree(folder.root / ".spool", ignore_errors=True)


@contextmanager
def _managed(settings: EngineSettings, record: RunRecord, folder: RunFolder, progress: Progress) -> Iterator[Engine]:
    from .extraction.serve import resolve_settings
    from .extraction.server import managed_server

    prefix = rid_prefix(record.run_id)
    server_settings = replace(
        resolve_settings(_serve_options(settings, record)), rid_prefix=prefix, log=folder.server_log, is_bounded=True
    )
    with managed_server(server_settings, progress) as server:
        yield _sglang_engine(server, prefix, settings)


@contextmanager
def _attached(settings: EngineSettings, record: RunRecord, progress: Progress) -> Iterator[Engine]:
    from .extraction.engines.pool import PoolEngine
    from .extraction.server import attached_server

    prefix = rid_prefix(record.run_id)
    api_key = os.environ.get("SGLANG_API_KEY")
    with ExitStack() as stack:
        engines = []
        for address in parse_servers(settings.servers, settings.dump_dir):
            expected = _expected(settings, address, record)
            server = stack.enter_context(attached_server(address.url, expected, progress, api_key=api_key))
            engines.append(_sglang_engine(server, prefix, settings))
        yield engines[0] if len(engines) == 1 else PoolEngine(engines, progress.note)


def _expected(settings: EngineSettings, address: ServerAddress, record: RunRecord) -> Expected:
    from .extraction.serve import resolve_settings
    from .extraction.server_checks import Expected

    found = resolve_settings(_serve_options(replace(settings, dump_dir=address.dump_dir), record))
    return Expected(
        model=record.model.name,
        layers=record.layers,
        rid_prefix=rid_prefix(record.run_id),
        dump_dir=found.dump_dir,
        revision=found.revision,
        allow_untested=settings.allow_untested,
        is_bounded=True,
    )


def _sglang_engine(server: Server, prefix: str, settings: EngineSettings) -> SglangEngine:
    from .extraction.engines.sglang import DEFAULT_CONCURRENCY, Patience, SglangEngine

    patience = Patience(stall_s=settings.stall_timeout_s)
    return SglangEngine(server, prefix, concurrency=settings.concurrency or DEFAULT_CONCURRENCY, patience=patience)


def _serve_options(settings: EngineSettings, record: RunRecord) -> ServeOptions:
    from .extraction.serve import ServeOptions

    return ServeOptions(
        model=record.model.name,
        revision=record.model.hub_revision,
        layers=record.layers,
        profile=settings.profile,
        port=settings.port,
        dump_dir=settings.dump_dir,
        sglang_python=settings.sglang_python,
        sglang_args=(*settings.sglang_args, *([DETERMINISTIC] if settings.deterministic else [])),
        trust_remote_code=settings.trust_remote_code,
        allow_untested=settings.allow_untested,
        start_timeout_s=settings.start_timeout_s,
    )


def dump_dirs(settings: EngineSettings, engine: str, record: RunRecord, folder: RunFolder) -> tuple[Path, ...]:
    """Return the spools that the engine named `engine` will write to."""
    if engine == "transformers":
        return (spool_of(settings, folder),)
    from .extraction.serve import resolve_settings

    addresses = parse_servers(settings.servers, settings.dump_dir)
    given = [address.dump_dir for address in addresses] or [settings.dump_dir]
    return tuple(resolve_settings(_serve_options(replace(settings, dump_dir=one), record)).dump_dir for one in given)


def spool_of(settings: EngineSettings, folder: RunFolder) -> Path:
    """Return the transformers engine's spool: on the run's own file system a dump is renamed and not copied."""
    return settings.dump_dir or folder.root / ".spool"


def _refuse_server_options(settings: EngineSettings, reason: str) -> None:
    given = {
        "--port": settings.port,
        "--concurrency": settings.concurrency if settings.concurrency != 1 else None,
        "SGLang's own arguments": settings.sglang_args or None,
        "--deterministic": settings.deterministic or None,
        "--allow-untested": settings.allow_untested or None,
    }
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{option} has no effect on the transformers engine ({reason})",
                mend="Leave it out, or give --engine sglang",
            )


def _refuse_start_options(settings: EngineSettings) -> None:
    given = {
        "--port": settings.port,
        "SGLang's own arguments": settings.sglang_args or None,
        "--deterministic": settings.deterministic or None,
    }
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} has no effect on a server that is running already (--server)")
