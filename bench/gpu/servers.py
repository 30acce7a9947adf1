"""The servers that are measured: ours with the plugin, and the same command without it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eaglehs.extraction.capture_settings import DUMP_DIR, LAYERS, RID_PREFIX
from eaglehs.extraction.server import managed_server
from eaglehs.extraction.server_command import ServerSettings, build_command
from eaglehs.extraction.server_environment import choose_port
from eaglehs.schemas.progress import Silent

from bench.gpu.load import wait_until_serving

START_TIMEOUT_S = 300.0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the model, the Python that has SGLang, and SGLang's own arguments after --."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", default="2,4,5")
    parser.add_argument("--sglang-python", required=True)
    parser.add_argument("--dump-dir", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path())
    parser.add_argument("sglang_args", nargs="*")


def settings_of(given: argparse.Namespace, name: str) -> ServerSettings:
    """Return the settings of one server; `name` is its log's."""
    return ServerSettings(
        model=given.model,
        layers=tuple(int(layer) for layer in given.layers.split(",")),
        dump_dir=given.dump_dir,
        rid_prefix="eh-bench-",
        sglang_python=given.sglang_python,
        extra_args=tuple(given.sglang_args),
        log=given.logs / f"{name}.log",
        start_timeout_s=START_TIMEOUT_S,
    )


@contextmanager
def server_with_plugin(settings: ServerSettings) -> Iterator[str]:
    """Yield the URL of a server as `eaglehs extract` starts it."""
    with managed_server(settings, Silent()) as server:
        yield server.url


@contextmanager
def server_without_plugin(settings: ServerSettings) -> Iterator[str]:
    """Yield the URL of the same server command without anything of ours in it."""
    port = choose_port(settings.host, None)
    command = build_command(settings, port=port)
    environment = {key: value for key, value in command.full_environment.items() if key not in _OURS}
    assert settings.log is not None
    with settings.log.open("wb") as log:
        process = subprocess.Popen(
            command.argv, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=settings.log.parent
        )
    url = f"http://{settings.host}:{port}"
    try:
        wait_until_serving(url, lambda: process.poll() is None, START_TIMEOUT_S)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


_OURS = {DUMP_DIR, LAYERS, RID_PREFIX}
