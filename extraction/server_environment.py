"""What is found out about the machine before a server is started: SGLang, the port, the plugin."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from ..schemas.errors import EngineError, UsageError
from .sglang_versions import UNTESTED_MEND, is_supported, parse_version, supported_range

_ASK_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"
_ASK_TIMEOUT_S = 60.0

HIGHEST_PORT = 55_535
"""SGLang 0.5.11 to 0.5.15 adds 10,000 for gRPC, used or not, and does not start where that is past the last port."""

_LOWEST_PORT = 20_000
"""Linux gives out ports from 32,768 to 60,999 itself; below are others that few services have."""

_MORE_PORTS = 100
"""How many are tried once the system has given one that is too high."""


class SglangMissingError(UsageError):
    """There is no usable SGLang in the Python that was named."""


class PortInUseError(UsageError):
    """Something listens on the port that the server should have."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        """`reason` is the operating system's."""
        self.port = port
        super().__init__(
            f"port {port} of {host} can't be used: {reason}",
            why="Another program, perhaps an earlier server, listens there",
            mend="Stop it, or give another --port. To use a server that runs, give --server URL",
        )


def find_sglang_version(python: str, *, allow_untested: bool = False) -> str:
    """Return the version of SGLang that the Python `python` has; SGLang itself is not imported.

    With `allow_untested` any version is returned.

    Raises:
        SglangMissingError: no such Python, or no SGLang in it.
        EngineError: the version is not one that capture is known to work with.
    """
    try:
        asked = subprocess.run(
            [python, "-c", _ASK_VERSION], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise SglangMissingError(
            f"{python} can't be run: {fault}", mend="Give the Python that has SGLang with --sglang-python"
        ) from None
    if asked.returncode != 0:
        raise SglangMissingError(
            f"{python} has no SGLang",
            mend="Install it there with: pip install 'eaglehs[sglang]', or give another Python with --sglang-python",
        )
    text = asked.stdout.strip()
    if not (allow_untested or is_supported(parse_version(text))):
        raise EngineError(
            f"{python} has SGLang {text}, expected {supported_range()}",
            why="The capture relies on names inside SGLang that other versions may not have",
            mend=f"Install such a version there, give another Python with --sglang-python, {UNTESTED_MEND}",
        )
    return text


def choose_port(host: str, port: int | None) -> int:
    """Return `port` if it is free, or a free one where it is None: one that every release of SGLang can take.

    Raises:
        PortInUseError: it can't be bound.
    """
    if port is not None:
        return _bindable(host, port)
    found = _bindable(host, 0)
    for other in random.sample(range(_LOWEST_PORT, HIGHEST_PORT + 1), _MORE_PORTS):
        if found <= HIGHEST_PORT:
            break
        with contextlib.suppress(PortInUseError):
            found = _bindable(host, other)
    return found


def _bindable(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does: a port in TIME_WAIT after the last run is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as fault:
            raise PortInUseError(host, port, fault.strerror or str(fault)) from None
        found: int = probe.getsockname()[1]
    return found


def find_plugin_site(python: str) -> Path | None:
    """Return a folder for PYTHONPATH that brings the plugin into another Python than ours; None for our own."""
    from .plugin_site import make_plugin_site, site_name

    # Not resolved: two virtual environments link to one interpreter.
    if Path(shutil.which(python) or python).absolute() == Path(sys.executable).absolute():
        return None
    return make_plugin_site(_cache() / "plugin-site" / site_name())


def _cache() -> Path:
    return Path(os.environ.get("EAGLEHS_CACHE") or Path.home() / ".cache" / "eaglehs")
