"""Which arrays a sample has, how they are called, typed and laid out: one table under every stage.

Hook point. State k is the residual stream that *enters* decoder layer k, 0-based: the output of layer k-1,
transformers' `hidden_states[k]`, SGLang's `layers_to_capture` entry k, vLLM's aux layer id k. In SpecForge,
TorchSpec, AngelSlim and ModelOpt's HF dump the same state is called k-1 ("output of layer"). `final` is the output of
the model's last norm, the LM head's input, transformers' `hidden_states[-1]`. Rows are unshifted: row t is made by
feeding token t.

Arrays of a sample of T tokens, in the order of the shard's members (H = hidden width):

    name        member                dtype in the shard      shape
    input_ids   input_ids.npy         int32, little-endian    [T, 1]
    loss_mask   loss_mask.npy         uint8                   [T, 1]   1 = a token that the drafter is trained on
    layer_<k>   layer_<k>.bf16.npy    uint16: bits of bf16    [T, H]   ascending k
    final       final.bf16.npy        uint16: bits of bf16    [T, H]

With codec `planes-zstd` the states are coded, without loss, in members `layer_<k>.bf16.planes` and `final.bf16.planes`
(schemas/planes.py); ids and mask stay as they are. A name that ends so is taken by stock readers for plain bytes; one
in `.zst` they would decompress, and one in `.raw` or `.bin` some take for audio or pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .counts import counted
from .errors import UsageError

CAPTURE = "layer_input"
"""The one hook point that eaglehs captures; stands beside layer numbers in every record."""

FINAL = "final"
INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"

MAX_MEMBER_BYTES = 2_147_483_646
"""A column value above this can't be held by Arrow's `binary` and list types (datasets issue 7691)."""

BITS_SUFFIX = ".bf16.npy"
"""Ends the member of a plain state: the bits of bfloat16 as uint16."""

PLANES_SUFFIX = ".bf16.planes"
"""Ends the member of a coded state."""

_STATE = re.compile(r"final|layer_(0|[1-9]\d*)")


class Codec(StrEnum):
    """How a dataset's states are stored."""

    PLAIN = "plain"
    """As they are: readers map them."""

    PLANES_ZSTD = "planes-zstd"
    """Byte planes under zstd (schemas/planes.py): about 0.7 of the bytes, for archives and slow links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array of a sample: where it stands in a shard and how its bytes read."""

    name: str
    """Name in dumps, the index and tensors: `input_ids`, `loss_mask`, `layer_<k>`, `final`."""

    member: str
    """Name in the shard after `<key>.`, and so the column in `datasets` and `webdataset`."""

    dtype: str
    """numpy dtype string of the array: `<i4`, `|u1` or `<u2`."""

    row_bytes: int
    """Bytes of one row (one token), not coded."""

    width: int
    """Second dimension: 1, or the hidden width H."""

    codec: Codec = Codec.PLAIN
    """`plain`: the member is the array as `.npy`."""

    @property
    def is_state(self) -> bool:
        """Whether the array holds bf16 states, and not ids or mask."""
        return self.name == FINAL or self.name.startswith("layer_")


def layer_state(layer: int) -> str:
    """Return the name of the state that enters decoder layer `layer`."""
    return f"layer_{layer}"


def state_names(layers: Iterable[int]) -> tuple[str, ...]:
    """Return the names of all states of a sample, in file order: the layers as given, then `final`."""
    return (*(layer_state(layer) for layer in layers), FINAL)


def layers_of(names: Iterable[str]) -> tuple[int, ...]:
    """Return the layers whose states are among `names`, in their order; what else is among them is passed over."""
    return tuple(int(name.removeprefix("layer_")) for name in names if is_state_name(name) and name != FINAL)


def is_state_name(name: str) -> bool:
    """Tell whether `name` is `final` or `layer_<k>`."""
    return _STATE.fullmatch(name) is not None


def state_member(name: str, codec: Codec) -> str:
    """Return the name of a state's member after `<key>.`."""
    return name + (BITS_SUFFIX if codec is Codec.PLAIN else PLANES_SUFFIX)


def array_specs(layers: Iterable[int], hidden_size: int, codec: Codec = Codec.PLAIN) -> tuple[ArraySpec, ...]:
    """Return the arrays of a sample in member order."""
    ids = ArraySpec(name=INPUT_IDS, member="input_ids.npy", dtype="<i4", row_bytes=4, width=1)
    mask = ArraySpec(name=LOSS_MASK, member="loss_mask.npy", dtype="|u1", row_bytes=1, width=1)
    states = (
        ArraySpec(
            name=name,
            member=state_member(name, codec),
            dtype="<u2",
            row_bytes=2 * hidden_size,
            width=hidden_size,
            codec=codec,
        )
        for name in state_names(layers)
    )
    return (ids, mask, *states)


def bytes_per_token(layers: Iterable[int], hidden_size: int) -> int:
    """Return the bytes of ids, mask and states of one token (57,349 for three layers of Kimi-K2.5 and `final`)."""
    return sum(spec.row_bytes for spec in array_specs(layers, hidden_size))


def check_layers(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return `layers` ascending, if each names a state that enters one of the model's decoder layers.

    Raises:
        UsageError: none, repeated, or out of 0..num_layers-1. `num_layers` itself would be the un-normed output of
            the last layer: it matches no step of the model's loop and is lost in silence by several engines.
    """
    if not layers:
        raise UsageError("no layers to capture", mend="Give --layers such as 3,31,59")
    repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
    if repeated:
        raise UsageError(f"layer {repeated[0]} is given twice in --layers {','.join(map(str, layers))}")
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise UsageError(
                f"layer {layer} is out of range: the model has {counted(num_layers, 'decoder layer')}, "
                f"so 0..{num_layers - 1}",
                why="State k is the residual stream that enters layer k; `final` (after the last norm) is always kept",
            )
    return tuple(sorted(layers))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return SGLang's and EAGLE-3's rule [2, n//2, n-3] for a model of n layers, for n of at least 6.

    Source: `set_eagle3_layers_to_capture(None)` in SGLang; EAGLE's `modeling_llama_kv.py`.

    Raises:
        UsageError: the model is too shallow for the rule.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if num_layers < 6 or len(set(layers)) < len(layers):
        raise UsageError(f"a model of {counted(num_layers, 'layer')} has no default layers", mend="Give --layers")
    return layers
