"""States whose bits any cast would change: NaN payloads, signed zeros, subnormals, values past float16."""

import numpy as np
import torch

HOSTILE_BITS = (
    0x0000,  # 0.0
    0x8000,  # -0.0
    0x0001,  # the smallest subnormal
    0x807F,  # the largest negative subnormal
    0x7F80,  # inf
    0xFF80,  # -inf
    0x7FC0,  # the usual NaN
    0x7F81,  # a signalling NaN with a payload
    0xFFFF,  # a negative NaN, all bits set
    0x7149,  # 1e30
    0x4789,  # 70144, past float16's largest
    0x3F80,  # 1.0
)


def hostile_states(num_tokens: int, hidden_size: int, seed: int = 0) -> np.ndarray:
    """Return uint16 [T, H]: the hostile patterns first, then any bits at all."""
    bits = np.random.default_rng(seed).integers(0, 65536, size=(num_tokens, hidden_size), dtype=np.uint16)
    flat = bits.reshape(-1)
    flat[: len(HOSTILE_BITS)] = HOSTILE_BITS[: len(flat)]
    return bits


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a bfloat16 tensor: NaNs never equal one another, their bits do."""
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.uint16).numpy()
