"""Loads a transformers model, for the engine and for what checks its rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from ...schemas.counts import counted
from ...schemas.errors import EngineError, first_line


class ModelLoadError(EngineError):
    """The model could not be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Which model, and whether its own code may run."""

    model: str
    """Folder or Hub name."""

    revision: str | None = None
    trust_remote_code: bool = False


def load_config(source: ModelSource) -> Any:
    """Return the model's transformers config.

    Raises:
        ModelLoadError: there is none, or it needs code that may not run.
    """
    try:
        return transformers.AutoConfig.from_pretrained(
            source.model, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, ImportError, StrictDataclassError) as fault:
        raise _load_error(source.model, fault) from fault


def load_model(source: ModelSource, config: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the model on `device`, ready to run. Takes as long as reading its weights does.

    Raises:
        ModelLoadError: transformers does not know it, a file is missing or damaged, or it does not fit.
    """
    if device.type == "cuda":
        _repeat_bits_on_cuda()
    transformers.utils.logging.disable_progress_bar()  # it would draw over the command's own
    try:
        model = _auto_class(config).from_pretrained(
            source.model, revision=source.revision, trust_remote_code=source.trust_remote_code, dtype=dtype
        )
        return model.to(device).eval()
    except (OSError, ValueError, ImportError, RuntimeError) as fault:
        raise _load_error(source.model, fault) from fault


def pick_device(name: str) -> torch.device:
    """Return the device `name`: `auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:1`."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def device_name(device: torch.device) -> str:
    """Return what the device is, for people."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"{device}, {counted(torch.get_num_threads(), 'thread')}"


def _auto_class(config: Any) -> Any:
    """Return the auto class for the model: wrappers around a language model are filed under image-text-to-text."""
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return transformers.AutoModelForCausalLM if is_causal or has_own_code else transformers.AutoModelForImageTextToText


def _repeat_bits_on_cuda() -> None:
    """Choose kernels that sum in a fixed order; the atomics of expert layers would differ from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


def _load_error(model: str, fault: Exception) -> ModelLoadError:
    trust = "trust_remote_code" in str(fault)
    return ModelLoadError(
        f"transformers can't load {model}: {first_line(fault)}",
        mend="Give --trust-remote-code if you trust its code" if trust else "",
    )
