"""A stand-in for libcuda.so.1: lets `sgl_kernel` be imported where there is no driver; nothing in it is ever called."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_DRIVER_NAME = re.compile(r"\sU (cu[A-Z]\w*)(?:@\S+)?$", re.MULTILINE)

_CUDA_ERROR_NO_DEVICE = 100


def build_libcuda_stub(sglang_python: Path, folder: Path) -> Path:
    """Build the stub for the SGLang of `sglang_python` and return its folder, for LD_LIBRARY_PATH."""
    names = sorted(_undefined_driver_names(_kernel_folder(sglang_python)))
    source = folder / "stub.c"
    source.write_text("\n".join(f"int {name}(void) {{ return {_CUDA_ERROR_NO_DEVICE}; }}" for name in names))
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True, capture_output=True
    )
    return folder


def _kernel_folder(sglang_python: Path) -> Path:
    # Found without importing it: the import is what fails without the stub.
    find = "import importlib.util; print(importlib.util.find_spec('sgl_kernel').origin)"
    found = subprocess.run([sglang_python, "-c", find], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip()).parent


def _undefined_driver_names(kernel_folder: Path) -> set[str]:
    libraries = [*kernel_folder.glob("*.so"), *kernel_folder.glob("sm100/*.so")]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], check=True, capture_output=True, text=True)
    return set(_DRIVER_NAME.findall(listed.stdout))
