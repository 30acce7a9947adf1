"""What the plugin reads of the SGLang that it is a guest in, across versions; all knowledge of its insides is here.

Found by feature, not by version number: see PATCHES.md for what was read and run, and how to tell that it still holds.
SGLang is imported inside functions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..schemas.errors import EngineError
from .capture_rules import RULES, Violation, violations_in_info

CLIENTS_RULES = frozenset({"prefix cache", "cache across requests", "silent truncation", "embedding mode"})
"""Rules that the client answers for: capture is right under them, it is the run that would come short."""

ROW_SETTINGS = ("chunked_prefill_size", "max_prefill_tokens")
"""The budget of a batch in rows, with and without chunked prefill."""

CAPTURED_MODES = ("EXTEND", "MIXED")
"""SGLang's names of the forward modes whose rows may be prompt tokens; MIXED has decode rows among them."""


class CaptureRefusedError(EngineError):
    """This server can't be captured right, as it is set or for the model that it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the dumps and capture.json say of the model."""

    model_class: str
    num_layers: int
    hidden_size: int
    dtype: str
    """Such as `bfloat16`."""


def sglang_version() -> str:
    """Return the version of the installed SGLang, or `unknown`."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def resolved_settings(server_args: Any) -> dict[str, Any]:
    """Return the settings that the rules and the ring ask about, as they are in force.

    SGLang decides several of them after parsing. Since 0.5.15 the record that the model runner holds stays as it
    was given, and the decisions stand beside it: `resolved_dict()` since 0.5.19, `_resolved()` before.
    """
    view = server_args
    for name in ("resolved_dict", "_resolved"):
        if hasattr(server_args, name):
            view = getattr(server_args, name)()
            break
    wanted = [*ROW_SETTINGS, *(setting for rule in RULES for setting in rule.settings)]
    if isinstance(view, Mapping):
        return {name: view[name] for name in wanted if name in view}
    return {name: _plain(getattr(view, name)) for name in wanted if hasattr(view, name)}


def _plain(value: Any) -> Any:
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_record else value


def rows_in_a_batch(settings: Mapping[str, Any]) -> int | None:
    """Return how many rows a batch has at most, as far as SGLang says; mixed chunks add a few, so split larger ones."""
    chunk, whole = (settings.get(name) for name in ROW_SETTINGS)
    if chunk is not None and chunk > 0:
        return int(chunk)
    return None if whole is None else int(whole)


def refused_settings(settings: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield the settings under which rows would be lost, mixed or changed."""
    for violation in violations_in_info(settings):
        if violation.rule.name not in CLIENTS_RULES:
            yield violation


def tensor_parallel_rank(runner: Any) -> int:
    """Return the rank of this process among those that share the model; without DP and PP, the attention's rank too."""
    if hasattr(runner, "tp_rank"):  # up to 0.5.15, and 0.5.21
        return int(runner.tp_rank)
    if hasattr(runner, "ps"):  # 0.5.16 to 0.5.20
        return int(runner.ps.tp_rank)
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def model_shape(runner: Any) -> ModelShape:
    """Return what is known of the loaded model; of the text part where it has others."""
    config = runner.model_config.hf_text_config
    return ModelShape(
        model_class=type(runner.model).__name__,
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        dtype=str(runner.model_config.dtype).removeprefix("torch."),
    )


def find_backbone(model: torch.nn.Module) -> Any:
    """Return the module (a `torch.nn.Module`) that collects the states on the way through its layers.

    Raises:
        CaptureRefusedError: there is none, or more than one, or its list may mean something else.
    """
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "layers_to_capture")]
    name_of_model = type(model).__name__
    if len(found) != 1:
        names = ", ".join(name or "the model itself" for name, _ in found) or "none"
        raise CaptureRefusedError(
            f"{name_of_model}: expected one module with `layers_to_capture`, found {names}",
            why="Capture uses the points that SGLang itself has for EAGLE-3, and this model file has no clear one",
            mend="Use --engine transformers, or an SGLang version whose file for this model has `layers_to_capture`",
        )
    name, backbone = found[0]
    if not isinstance(backbone.layers_to_capture, list):
        kind = type(backbone.layers_to_capture).__name__
        raise CaptureRefusedError(
            f"{name_of_model}: {name}.layers_to_capture is {kind}, not a list",
            why="Model files of that form were seen to count outputs of layers, so that states would be one off",
            mend="Use --engine transformers for this model",
        )
    return backbone


def capture_layers(backbone: Any, layers: Sequence[int]) -> None:
    """Tell the backbone to collect the states that enter `layers`.

    Set directly, not by SGLang's `set_eagle3_layers_to_capture`, which counts layer outputs in some model files and not
    in others. Most files read the list; Qwen's MoE files and MiniMax-M3 read a flag on each layer instead.
    """
    backbone.layers_to_capture = list(layers)
    for layer in layers:
        if hasattr(backbone, "layers"):
            backbone.layers[layer]._is_layer_to_capture = True
