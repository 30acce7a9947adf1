"""Looks at the machine as `extract` would, without prompts or a model: what is there, and what would stop a run.

Nothing heavy is imported and nothing is started or written.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from . import __version__
from .preflight import nearest_folder
from .schemas.counts import counted
from .schemas.errors import EaglehsError
from .schemas.sizes import format_size

NEEDED = ("torch", "transformers", "datasets", "huggingface_hub", "numpy", "pyarrow", "httpx", "xxhash", "zstandard")
OPTIONAL = ("sglang", "webdataset", "matplotlib")

FEW_FILES = 1024
"""File descriptors below which a server with some hundred connections fails."""

SMALL_BYTES = 1_000_000_000
"""Below this a dump folder holds few long samples: one of 1,730 tokens of Kimi-K2.5 has 99 MB."""

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at
_NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What to look at; None takes the defaults of `extract`."""

    out: Path = Path("run")
    dump_dir: Path | None = None
    sglang_python: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """One folder that a run would write to."""

    use: str
    path: str
    total_bytes: int
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sglang:
    """The SGLang that a server would be started with."""

    python: str
    version: str | None
    """None: there is none."""

    is_supported: bool
    message: str
    """What is wrong with it, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is there, and what is wrong with it."""

    eaglehs: str
    python: str
    system: str
    packages: dict[str, str | None]
    """Package -> version; None where it is not installed."""

    gpus: tuple[str, ...]
    """Name, memory and driver of each."""

    engine: str
    """What `--engine auto` takes here."""

    engine_reason: str
    sglang: Sglang
    folders: tuple[Folder, ...]
    file_limit: int
    """Most open files of a process."""

    faults: tuple[str, ...]
    """What would stop a run."""

    warnings: tuple[str, ...]


def diagnose(where: Where) -> Diagnosis:
    """Return what a run with these folders would find."""
    from .extraction.dump_folder import default_dump_dir
    from .extraction.engines.choose import choose_engine

    packages = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    gpus = tuple(_gpus())
    sglang = _sglang(where.sglang_python or sys.executable)
    engine, reason = choose_engine("auto", where.sglang_python)
    spool = where.dump_dir or default_dump_dir()
    folders = [_folder("run", where.out), _folder("spool", spool)]
    if _SHARED_MEMORY.is_dir():
        folders.append(_folder("shm", _SHARED_MEMORY))
    found = Diagnosis(
        eaglehs=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.release()}, {counted(len(os.sched_getaffinity(0)), 'processor')}",
        packages=packages,
        gpus=gpus,
        engine=engine,
        engine_reason=reason,
        sglang=sglang,
        folders=tuple(folders),
        file_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        faults=(),
        warnings=(),
    )
    return _judged(found, is_sglang_asked=where.sglang_python is not None)


def _judged(found: Diagnosis, *, is_sglang_asked: bool) -> Diagnosis:
    faults = tuple(_faults(found, is_sglang_asked=is_sglang_asked))
    return replace(found, faults=faults, warnings=tuple(_warnings(found, is_sglang_asked=is_sglang_asked)))


def _faults(found: Diagnosis, *, is_sglang_asked: bool) -> Iterator[str]:
    for name in NEEDED:
        if found.packages[name] is None:
            yield f"the package {name} is missing: pip install eaglehs brings it"
    if found.sglang.message and (is_sglang_asked or found.gpus):
        yield found.sglang.message
    for folder in found.folders:
        if not folder.is_writable:
            yield f"the {folder.use} {folder.path} can't be written by this user"
        elif folder.free_bytes == 0:
            yield f"the {folder.use} {folder.path} is full: 0 of {format_size(folder.total_bytes)} are free"
    if found.file_limit < FEW_FILES:
        files = counted(found.file_limit, "file")
        yield f"a process may open {files}, a server needs {FEW_FILES:,} and more: ulimit -n 65536"


def _warnings(found: Diagnosis, *, is_sglang_asked: bool) -> Iterator[str]:
    if found.sglang.message and not is_sglang_asked and not found.gpus:
        yield f"{found.sglang.message} Without it only the transformers engine can be used, fit for small models"
    elif not found.gpus:
        yield "no NVIDIA GPU is visible: SGLang then needs --profile cpu, or use --engine transformers"
    for folder in found.folders:
        if folder.is_writable and 0 < folder.free_bytes < SMALL_BYTES:
            yield (
                f"the {folder.use} {folder.path} has {format_size(folder.free_bytes)} free: "
                "long prompts of large models may not fit (a container's /dev/shm grows with --shm-size)"
            )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sglang(python: str) -> Sglang:
    from .extraction.server_environment import find_sglang_version
    from .extraction.sglang_versions import UNTESTED_MEND, is_supported, parse_version, supported_range

    try:
        version = find_sglang_version(python, allow_untested=True)
    except EaglehsError as fault:
        return Sglang(python=python, version=None, is_supported=False, message=str(fault))
    is_known, message = is_supported(parse_version(version)), ""
    if not is_known:
        message = f"{python} has SGLang {version}, expected {supported_range()}, {UNTESTED_MEND}"
    return Sglang(python=python, version=version, is_supported=is_known, message=message)


def _gpus() -> Iterator[str]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return
    query = [smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if said.returncode == 0:
        yield from (line.strip() for line in said.stdout.splitlines() if line.strip())


def _folder(use: str, path: Path) -> Folder:
    there = nearest_folder(path)
    usage = shutil.disk_usage(there)
    return Folder(
        use=use,
        path=str(path),
        total_bytes=usage.total,
        free_bytes=usage.free,
        is_writable=os.access(there, os.W_OK | os.X_OK),
    )
