"""One state, many names: what each captured layer is called by the servers and trainers of the field.

The same three numbers mean different layers in different projects, and some servers shift them by version or by model
file. So the card names each state by what it physically is and gives everyone's number for it.

Sources: `hidden_states` of transformers; `layers_to_capture` of SGLang (compared with the loop index before the layer
runs); aux layer ids of vLLM; "output of layer" ids of SpecForge, TorchSpec, AngelSlim and ModelOpt's HF dump.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schemas.states import FINAL, layer_state


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """The names of one captured state; a number that does not exist is a dash."""

    state: str
    physical: str
    transformers: str
    vllm: str
    sglang: str
    output_of: str
    """Id in projects that count the layer whose output it is."""


def layer_names(layers: tuple[int, ...], num_layers: int) -> tuple[LayerNames, ...]:
    """Return a row for each captured layer and one for `final`."""
    return (*(_captured(layer) for layer in layers), _final(num_layers))


def server_ids(layers: tuple[int, ...]) -> tuple[str, str]:
    """Return the captured layers as both ways of counting write them: input-of-layer ids, output-of-layer ids."""
    return _list(layers), _list(tuple(layer - 1 for layer in layers))


def _captured(layer: int) -> LayerNames:
    source = f"output of layer {layer - 1}" if layer else "embeddings"
    return LayerNames(
        state=layer_state(layer),
        physical=f"{source} = input of layer {layer}",
        transformers=f"hidden_states[{layer}]",
        vllm=str(layer),
        sglang=str(layer),
        output_of=str(layer - 1),
    )


def _final(num_layers: int) -> LayerNames:
    return LayerNames(
        state=FINAL,
        physical="after the last norm, the LM head's input; the last of `hidden_states`",
        transformers=f"hidden_states[{num_layers}]",
        vllm="–",
        sglang="–",
        output_of="–",
    )


def _list(layers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, layers))}]"
