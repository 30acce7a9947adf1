"""Taps: forward hooks that take chosen states out of a transformers model, and the proof that they are the right ones.

`output_hidden_states=True` keeps every layer of every token: 61 layers of 8,192 tokens of Kimi-K2.5 are 7 GB. The
taps keep the chosen ones only. When a model is loaded, `check_taps` runs a few tokens both ways and refuses the model
unless each tapped state is `hidden_states[k]` bit for bit and `final` is, bit for bit, what the LM head is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...schemas.counts import counted
from ...schemas.errors import EngineError
from ...schemas.states import FINAL, layer_state

NUM_CHECK_TOKENS = 8

# Shape legend: T tokens, H hidden width; the leading 1 is the batch.


class UnknownBackboneError(EngineError):
    """No part of the model looks like a stack of decoder layers over token embeddings."""


class WrongStateError(EngineError):
    """A tapped state is not what eaglehs calls by that name: rows of another hook point would be stored."""


def find_backbone(model: Any, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Return the text backbone and its decoder layers, also inside a vision-language wrapper.

    It is the one module that has the token embeddings and a list of `num_layers` layers as its direct children; a
    vision tower has other embeddings.

    Raises:
        UnknownBackboneError: there is no such module, or more than one.
    """
    embeddings = model.get_input_embeddings()
    found = [
        (module, layers)
        for module in model.modules()
        if any(child is embeddings for child in module.children())
        for layers in module.children()
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers
    ]
    if len(found) != 1:
        raise UnknownBackboneError(
            f"{type(model).__name__}: found {counted(len(found), 'text backbone')} of "
            f"{counted(num_layers, 'layer')}, expected 1",
            mend="Use --engine sglang for this model",
        )
    return found[0]


class Taps:
    """Hooks on one model that hold the chosen states of its last forward pass."""

    def __init__(
        self, model: Any, layers: tuple[int, ...], num_layers: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Hook into the chosen decoder layers and the backbone; `dtype` is what their states must be.

        Raises:
            UnknownBackboneError: see `find_backbone`.
        """
        self.layers = layers
        self._dtype = dtype
        self._states: dict[str, Tensor] = {}
        backbone, decoder_layers = find_backbone(model, num_layers)
        for layer in layers:
            decoder_layers[layer].register_forward_pre_hook(self._keep_input(layer_state(layer)), with_kwargs=True)
        backbone.register_forward_hook(self._keep_output)

    def take(self) -> dict[str, Tensor]:
        """Return the states of the last forward pass, name -> [T, H] on the CPU, and forget them.

        Raises:
            WrongStateError: a hook did not fire, or a state is not of the model's dtype.
        """
        states, self._states = self._states, {}
        for name in (*map(layer_state, self.layers), FINAL):
            if name not in states:
                raise WrongStateError(f"the model ran without passing {name}", mend="Use --engine sglang for it")
            if states[name].dtype != self._dtype:
                raise WrongStateError(f"{name} is {states[name].dtype}, expected {self._dtype}")
        return states

    def _keep_input(self, name: str) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(name, args[0] if args else kwargs["hidden_states"])

        return keep

    def _keep_output(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._keep(FINAL, output[0] if isinstance(output, tuple) else output.last_hidden_state)

    def _keep(self, name: str, state_1TH: Tensor) -> None:
        # A copy, at once: a later layer may add to the same memory.
        self._states[name] = state_1TH.detach()[0].to("cpu", copy=True).contiguous()


@torch.inference_mode()
def check_taps(model: Any, taps: Taps, vocab_size: int) -> None:
    """Run a few tokens and prove that the taps hold `hidden_states[k]` and the LM head's input.

    Raises:
        WrongStateError: names the first state that differs. Typical cause for `final`: the class returns the last
            layer's output and norms it outside its backbone, or scales it before the head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise WrongStateError(f"{type(model).__name__} has no LM head, so `final` can't be told")
    head_inputs: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0]))
    try:
        ids_1T = torch.arange(NUM_CHECK_TOKENS, device=head.weight.device)[None] * (vocab_size // NUM_CHECK_TOKENS)
        output = model(input_ids=ids_1T, output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    states = taps.take()
    for layer in taps.layers:
        _expect_equal(model, layer_state(layer), states, output.hidden_states[layer], f"hidden_states[{layer}]")
    if not head_inputs:
        raise WrongStateError(f"{type(model).__name__} ran without its LM head, so `final` can't be told")
    _expect_equal(model, FINAL, states, head_inputs[0], "the LM head's input")


def _expect_equal(model: Any, name: str, states: dict[str, Tensor], wanted_1TH: Tensor, wanted_name: str) -> None:
    state_TH, wanted_TH = states[name], wanted_1TH[0].cpu()
    # Bits, not numbers: NaN is not equal to itself, and NaN weights are for the checks of the samples to find.
    if state_TH.dtype != wanted_TH.dtype or not torch.equal(state_TH.view(torch.int16), wanted_TH.view(torch.int16)):
        raise WrongStateError(
            f"{type(model).__name__}: {name} is not {wanted_name}",
            why="Its rows would be taken at another place than the dataset says",
            mend="Use --engine sglang for this model",
        )
