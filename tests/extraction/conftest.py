"""Fixtures of the extraction tests: one rig for real SGLang on the CPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from eaglehs.extraction.capture_settings import CaptureSettings
from eaglehs.extraction.plugin_site import make_plugin_site
from eaglehs.extraction.server_environment import find_sglang_version
from eaglehs.extraction.sglang_versions import parse_version

from tests.sglang_cpu.rig import CPU_FLAGS, PYTHON_VARIABLE, cpu_environment, sglang_python
from tests.sglang_cpu.server import SglangServer, running_server


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRig:
    """Starts real SGLang servers; one at a time, each takes half a minute."""

    python: Path
    folder: Path
    environment: dict[str, str]

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers of the SGLang at hand, which may be one that nobody tested yet."""
        return parse_version(find_sglang_version(str(self.python), allow_untested=True))

    def serve(self, model: Path, *flags: str, capture: CaptureSettings | None) -> AbstractContextManager[SglangServer]:
        """Return a context in which a server runs; without `capture` the plugin is not even on its path."""
        environment = dict(self.environment)
        if capture is not None:
            site = make_plugin_site(self.folder / "site")
            environment["PYTHONPATH"] = os.pathsep.join((str(site), environment["PYTHONPATH"]))
            environment |= capture.to_environment()
        log = self.folder / f"{model.name}-{len(list(self.folder.glob('*.log')))}.log"
        return running_server(self.python, model, flags=[*CPU_FLAGS, *flags], environment=environment, log=log)


@pytest.fixture(scope="session")
def cpu_rig(tmp_path_factory: pytest.TempPathFactory) -> CpuRig:
    """Skip where no SGLang is at hand."""
    python = sglang_python()
    if python is None:
        pytest.skip(f"{PYTHON_VARIABLE} is not set: no SGLang to run")
    folder = tmp_path_factory.mktemp("sglang")
    return CpuRig(python=python, folder=folder, environment=cpu_environment(python, folder))


@pytest.fixture(scope="module")
def spool() -> Iterator[Path]:
    """A dump folder in memory, as real runs have it: on a disk the files may hold up the server."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="eaglehs-test-", dir=memory if memory.is_dir() else None))
    yield folder / "dumps"
    shutil.rmtree(folder)
