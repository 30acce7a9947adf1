"""All states that transformers computes for a few tokens, with the proof that they are the right ones.

The model is loaded in bfloat16 as the transformers engine does it, and again in float32 where there is room: the
difference of the two is what bfloat16 explains. `check_taps` proves at load that the states taken are
`hidden_states[k]` and the LM head's input, bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..schemas.states import FINAL, layer_state
from .compare import ModelStates
from .engines.model_load import ModelSource, device_name, load_config, load_model, pick_device
from .engines.taps import Taps, check_taps, find_backbone
from .lm_head import LmHead

ROOM_SHARE = 0.5
"""Share of the free memory that the float32 copy may take."""

_NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


class Reference:
    """A model in bfloat16, and in float32 where that fits."""

    def __init__(self, source: ModelSource, *, device: str = "auto") -> None:
        """Load and prove; takes as long as loading the model twice does.

        Raises:
            ModelLoadError: transformers can't load the model.
            UnknownBackboneError, WrongStateError: its states can't be taken right; see engines/taps.py.
        """
        self._device = pick_device(device)
        config = load_config(source)
        self._rounded = _Tapped(load_model(source, config, self._device), config)
        self._exact: _Tapped | None = None
        if 2 * self._rounded.size_bytes <= ROOM_SHARE * _free_bytes(self._device):
            exact = load_model(source, config, self._device, torch.float32)
            self._exact = _Tapped(exact, config, torch.float32)

    @property
    def description(self) -> str:
        """What computes: package, versions, precision, device."""
        precision = "float32" if self._exact is not None else "bfloat16"
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return f"{versions}, {precision} on {device_name(self._device)}"

    @property
    def lm_head(self) -> LmHead:
        """The model's LM head, in bfloat16."""
        return self._rounded.lm_head

    def compute(self, input_ids: Sequence[int]) -> tuple[ModelStates, ModelStates | None]:
        """Return the states of these tokens: the best there are, and bfloat16's where the best are float32."""
        rounded = self._rounded.compute(input_ids)
        return (rounded, None) if self._exact is None else (self._exact.compute(input_ids), rounded)

    def close(self) -> None:
        """Free the models."""
        del self._rounded, self._exact
        gc.collect()


class _Tapped:
    """One loaded model with hooks on all its layers."""

    def __init__(self, model: Any, config: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        text = config.get_text_config()
        self._model = model
        self._taps = Taps(model, tuple(range(text.num_hidden_layers)), text.num_hidden_layers, dtype)
        check_taps(model, self._taps, text.vocab_size)
        backbone, layers = find_backbone(model, text.num_hidden_layers)
        self._norm = _last_norm(backbone)
        self._before_norm: Tensor | None = None
        layers[-1].register_forward_hook(self._keep_last_output)

    @property
    def size_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._model.parameters())

    @property
    def lm_head(self) -> LmHead:
        head = self._model.get_output_embeddings()
        return LmHead(weight=head.weight.detach(), bias=getattr(head, "bias", None))

    @torch.inference_mode()
    def compute(self, input_ids: Sequence[int]) -> ModelStates:
        head = self._model.get_output_embeddings()
        self._model(input_ids=torch.tensor([list(input_ids)], device=head.weight.device), use_cache=False)
        states = {name: state_TH.float() for name, state_TH in self._taps.take().items()}
        assert self._before_norm is not None, "the last layer's hook did not fire"
        return ModelStates(
            inputs=tuple(states[layer_state(layer)] for layer in self._taps.layers),
            before_norm=self._before_norm.float(),
            final=states[FINAL],
            normed_twice=self._norm_again(states[FINAL]),
        )

    def _norm_again(self, final_TH: Tensor) -> Tensor | None:
        if self._norm is None:
            return None
        weight = next(self._norm.parameters())
        normed: Tensor = self._norm(final_TH.to(weight.device, weight.dtype))
        return normed.float().cpu()

    def _keep_last_output(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        state_1TH: Tensor = output[0] if isinstance(output, tuple) else output
        self._before_norm = state_1TH.detach()[0].to("cpu", copy=True)


def _last_norm(backbone: nn.Module) -> nn.Module | None:
    """Return the backbone's last norm by its name, or None: it only serves to name a fault."""
    children = dict(backbone.named_children())
    found = next((children[name] for name in _NORM_NAMES if name in children), None)
    return found if found is not None and any(True for _ in found.parameters()) else None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
