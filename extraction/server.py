"""The life of a server: started by us (`managed_server`) or found running (`attached_server`), checked, and let go.

    settings -> contradictions -> SGLang's version -> dump folder locked and clean -> port -> processes under a guard
      -> first generated token -> /server_info and capture.json checked -> one trial dump -> ready
      -> ... -> TERM, KILL, dump folder clean

Both are context managers and work in the main thread around `asyncio.run`. Ctrl-C and SIGTERM end the block in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..schemas.progress import Progress
from ..schemas.run import EngineFacts
from .dump_folder import claimed, clean
from .engines.protocol import EngineDownError
from .interrupts import sigterm_as_interrupt
from .process import ProcessGroup, ProcessSpec
from .server_checks import Expected
from .server_command import ServerCommand, ServerSettings, build_command, check_arguments
from .server_environment import choose_port, find_plugin_site, find_sglang_version
from .server_ready import facts_of, inspect_server, wait_for_first_token
from .sglang_versions import is_supported, parse_version, untested_note
from .trial import try_capture

ATTACH_TIMEOUT_S = 60.0
"""A server that is said to be running gets this long to generate a token."""


class ServerDiedError(EngineDownError):
    """The server that we started has ended by itself."""

    def __init__(self, exit_code: int, log: Path | None, tail: str) -> None:
        """`tail` is the last lines of its log."""
        self.exit_code_of_server = exit_code
        self.tail = tail
        why = f"Its log {log} ends with:\n{tail}" if log is not None and tail else ""
        super().__init__(f"the SGLang server ended with exit code {exit_code}", why=why)


class Server(Protocol):
    """What the engine and the checks need of a server, whoever started it."""

    url: str
    api_key: str | None
    dump_dir: Path

    @property
    def facts(self) -> EngineFacts:
        """What to write into run.json; complete once the server is ready."""
        ...

    def check_alive(self) -> None:
        """Return if the server runs as far as can be told.

        Raises:
            ServerDiedError: its process has ended.
        """
        ...

    def last_words(self) -> str:
        """Return the last line of its log; empty where we have none."""
        ...


class ManagedServer:
    """A server that we started and that ends with us."""

    def __init__(self, settings: ServerSettings, command: ServerCommand, *, port: int, lock: int) -> None:
        """Start it; `lock` is kept open until its last process has ended."""
        self.settings = settings
        self.command = command
        self.url = f"http://{settings.host}:{port}"
        self.api_key = command.api_key
        self.dump_dir = settings.dump_dir
        self._facts: EngineFacts | None = None
        spec = ProcessSpec(
            argv=command.argv,
            environment=command.full_environment,
            log=settings.log,
            grace_s=settings.stop_grace_s,
            secrets=command.secrets,
            keep_open=(lock,),
        )
        self.processes = ProcessGroup(spec)

    @property
    def facts(self) -> EngineFacts:
        """See `Server`."""
        assert self._facts is not None, "the server is not ready"
        return self._facts

    def check_alive(self) -> None:
        """See `Server`."""
        code = self.processes.exit_code
        if code is not None:
            raise ServerDiedError(code, self.settings.log, self.processes.tail())

    def last_words(self) -> str:
        """See `Server`."""
        return self.processes.tail(1)

    def make_ready(self, progress: Progress) -> None:
        """Wait until it generates, check it, and see one dump come.

        Raises:
            ServerDiedError, ServerStartTimeoutError: it did not come up.
            ServerRefusedError: it came up, but would not capture right.
        """
        expected = _expected_of(self.settings)
        wait_for_first_token(self, self.settings.start_timeout_s, progress)
        evidence = inspect_server(self, expected)
        try_capture(self, expected, evidence.info)
        self._facts = facts_of(evidence, self.command)

    def wait(self) -> int:
        """Wait until it ends by itself, and return its exit code."""
        while (code := self.processes.wait(timeout_s=1.0)) is None:
            pass
        return code

    def stop(self) -> None:
        """End all its processes."""
        self.processes.stop()


class AttachedServer:
    """A server that someone else runs; it is never stopped."""

    def __init__(self, url: str, expected: Expected, *, api_key: str | None) -> None:
        """`expected.dump_dir` is the folder that the server dumps into, on this machine."""
        self.url = url.rstrip("/")
        self.expected = expected
        self.api_key = api_key
        self.dump_dir = expected.dump_dir
        self._facts: EngineFacts | None = None

    @property
    def facts(self) -> EngineFacts:
        """See `Server`."""
        assert self._facts is not None, "the server is not ready"
        return self._facts

    def check_alive(self) -> None:
        """Return always: a lost connection is the only sign of a server that is not ours."""

    def last_words(self) -> str:
        """See `Server`."""
        return ""

    def make_ready(self, progress: Progress) -> None:
        """Wait until it generates, check it, and see one dump come.

        Raises:
            ServerStartTimeoutError: it does not answer.
            ServerRefusedError: it answers, but would not capture right.
        """
        wait_for_first_token(self, ATTACH_TIMEOUT_S, progress)
        evidence = inspect_server(self, self.expected)
        version = str(evidence.info.get("version", "unknown"))
        if not is_supported(parse_version(version)):
            progress.note(untested_note(version))
        clean(self.dump_dir, rid_prefix=self.expected.rid_prefix)  # of an earlier start of this run, which was killed
        try_capture(self, self.expected, evidence.info)
        self._facts = facts_of(evidence, None)


@contextmanager
def managed_server(settings: ServerSettings, progress: Progress) -> Iterator[ManagedServer]:
    """Start a patched server, yield it when it is ready, and end it with the block, however that ends.

    Raises:
        UsageError: an argument that contradicts capture, a port or dump folder in use, no SGLang. Nothing was started.
        EngineError: it did not come up, or would not capture right. It was stopped.
    """
    check_arguments((*settings.profile.server.args, *settings.extra_args))
    version = find_sglang_version(settings.sglang_python, allow_untested=settings.allow_untested)
    if not is_supported(parse_version(version)):
        progress.note(untested_note(version))
    with sigterm_as_interrupt(), claimed(settings.dump_dir) as lock:
        port = choose_port(settings.host, settings.port)
        plugin_site = find_plugin_site(settings.sglang_python)
        command = build_command(settings, port=port, version=parse_version(version), plugin_site=plugin_site)
        if settings.log is not None:
            progress.note(f"starting SGLang on port {port}; its output goes to {settings.log}")
        server = ManagedServer(settings, command, port=port, lock=lock)
        try:
            server.make_ready(progress)
            yield server
        finally:
            server.stop()


@contextmanager
def attached_server(
    url: str, expected: Expected, progress: Progress, *, api_key: str | None = None
) -> Iterator[AttachedServer]:
    """Yield a running server when it has passed the same checks as one of ours; it is left as it is.

    Dumps of this run that are still in its folder at the end are removed.

    Raises:
        EngineError: it does not answer, or would not capture right.
    """
    server = AttachedServer(url, expected, api_key=api_key)
    server.make_ready(progress)
    try:
        yield server
    finally:
        with contextlib.suppress(OSError):  # dumps that came after their request was given up
            clean(server.dump_dir, rid_prefix=expected.rid_prefix)


def _expected_of(settings: ServerSettings) -> Expected:
    return Expected(
        model=settings.model,
        layers=settings.layers,
        rid_prefix=settings.rid_prefix,
        dump_dir=settings.dump_dir,
        revision=settings.revision,
        allow_untested=settings.allow_untested,
        is_bounded=settings.is_bounded,
    )
