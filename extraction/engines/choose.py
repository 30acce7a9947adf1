"""Which engine `auto` is, and why; looks at the machine without importing torch or SGLang."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from ...schemas.errors import UsageError

SGLANG = "sglang"
TRANSFORMERS = "transformers"

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_NVIDIA_SMI_TIMEOUT_S = 20.0


def choose_engine(name: str, sglang_python: str | None = None) -> tuple[str, str]:
    """Return the engine for `--engine name` and a one-line reason for the user.

    `auto` is sglang where it can be imported, or another Python is named that has it, and a GPU is visible, else
    transformers. What was asked for is taken as it is: whether that engine can start is its own to say.

    Raises:
        UsageError: the name is none of auto, sglang, transformers.
    """
    if name in (SGLANG, TRANSFORMERS):
        return name, f"--engine {name} is given"
    if name != "auto":
        raise UsageError(f"--engine {name!r} is none of auto, {SGLANG}, {TRANSFORMERS}")
    where = f"--sglang-python {sglang_python} is given" if sglang_python else "SGLang is installed"
    if not sglang_python and importlib.util.find_spec("sglang") is None:
        return TRANSFORMERS, "SGLang is not installed (pip install 'eaglehs[sglang]'); fit for small models only"
    if not has_gpu():
        return TRANSFORMERS, f"{where} but no GPU is visible; fit for small models only"
    return SGLANG, f"{where} and a GPU is visible"


def has_gpu() -> bool:
    """Tell whether an NVIDIA GPU is visible to this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    if _DRIVER_GPUS.is_dir() and any(_DRIVER_GPUS.iterdir()):
        return True
    # Some containers hide /proc/driver; nvidia-smi reaches the driver all the same.
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0" in listed.stdout
