"""The environment and flags under which real SGLang serves on a CPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .libcuda import build_libcuda_stub

PYTHON_VARIABLE = "EAGLEHS_SGLANG_PYTHON"

CPU_FLAGS = (
    "--device", "cpu",
    "--skip-tokenizer-init",
    "--attention-backend", "torch_native",
    "--disable-cuda-graph",
    "--mem-fraction-static", "0.1",
    "--max-total-tokens", "8192",
)  # fmt: skip


def sglang_python() -> Path | None:
    """Return the Python that has SGLang, or None where the variable is not set."""
    path = os.environ.get(PYTHON_VARIABLE)
    return Path(path) if path else None


def cpu_environment(python: Path, folder: Path) -> dict[str, str]:
    """Make the stub and the test plugin in `folder`; return the variables that a server needs beside our own.

    PYTHONPATH holds the test plugin alone; put the product's plugin site in front of it.
    """
    stub = folder / "libcuda"
    stub.mkdir(parents=True, exist_ok=True)
    build_libcuda_stub(python, stub)
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(stub), os.environ.get("LD_LIBRARY_PATH", "")))),
        "PYTHONPATH": str(_make_test_plugin(folder / "mla")),
    }


def _make_test_plugin(folder: Path) -> Path:
    metadata = folder / "mla_on_cpu-0.0.1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("mla_on_cpu.py"), folder)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mla_on_cpu\nVersion: 0.0.1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nmla_on_cpu = mla_on_cpu:register\n")
    return folder
