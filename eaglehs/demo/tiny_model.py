"""A random model of Kimi-K2's architecture, small enough to make in a second and to run on any CPU.

DeepSeek-V3 blocks as Kimi-K2 configures them: latent attention (MLA) with YaRN, one dense layer, then a
mixture of experts with a sigmoid router and a shared expert. The norm weights are random, so that a state taken
before a norm can't pass for one taken after it; the other weights are scaled so that every layer moves the residual
stream visibly, so that a state of a neighbouring layer can't pass either.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tiny_tokenizer import markup_id, write_tiny_tokenizer

if TYPE_CHECKING:
    from torch import Generator, Tensor

__all__ = ["MAX_POSITION", "NUM_LAYERS", "VOCAB_SIZE", "write_tiny_model", "write_tiny_tokenizer"]

NUM_LAYERS = 8
VOCAB_SIZE = 1024
"""The tokenizer's 1010 tokens, rounded up: the rest are reserved slots, as real checkpoints have them."""

MAX_POSITION = 16384

_HIDDEN = 128
_HEADS = 4
_Q_LORA = 48
_KV_LORA = 64
_NOPE = 32
_ROPE = 16
_VALUE = 32
_EXPERTS = 8
_DENSE = 256
_EXPERT_WIDTH = 64
_NUM_DENSE = 1

_Named = Iterator[tuple[str, "Tensor"]]


def write_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """Write config, bf16 weights, tokenizer and chat template of a tiny Kimi-shaped model into `folder`.

    The same seed gives the same bytes. No network is used.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = folder / "model.safetensors"
    save_file(dict(_weights(generator)), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it 0600: a server of another user could not read it
    _write_json(folder / "config.json", _config())
    _write_json(
        folder / "generation_config.json", {"eos_token_id": markup_id("<|im_end|>"), "max_length": MAX_POSITION}
    )
    write_tiny_tokenizer(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _config() -> dict[str, Any]:
    # Field names as in Kimi-K2's own config.json; SGLang needs moe_layer_freq, topk_method, scoring_func and YaRN.
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _DENSE,
        "moe_intermediate_size": _EXPERT_WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "q_lora_rank": _Q_LORA,
        "kv_lora_rank": _KV_LORA,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _VALUE,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": _NUM_DENSE,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": MAX_POSITION,
        "rope_theta": 50000.0,
        "rope_scaling": _yarn(),
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "ep_size": 1,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": markup_id("[BOS]"),
        "eos_token_id": markup_id("[EOS]"),
        "pad_token_id": markup_id("[PAD]"),
    }


def _yarn() -> dict[str, Any]:
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": MAX_POSITION // 4,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _weights(generator: Generator) -> _Named:
    yield "model.embed_tokens.weight", _matrix(generator, VOCAB_SIZE, _HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", _norm(generator, _HIDDEN)
        yield prefix + "post_attention_layernorm.weight", _norm(generator, _HIDDEN)
        yield from _attention(generator, prefix + "self_attn.")
        if layer < _NUM_DENSE:
            yield from _mlp(generator, prefix + "mlp.", _DENSE)
        else:
            yield from _experts(generator, prefix + "mlp.")
    yield "model.norm.weight", _norm(generator, _HIDDEN)
    yield "lm_head.weight", _matrix(generator, VOCAB_SIZE, _HIDDEN)


def _attention(generator: Generator, prefix: str) -> _Named:
    yield prefix + "q_a_proj.weight", _matrix(generator, _Q_LORA, _HIDDEN)
    yield prefix + "q_a_layernorm.weight", _norm(generator, _Q_LORA)
    yield prefix + "q_b_proj.weight", _matrix(generator, _HEADS * (_NOPE + _ROPE), _Q_LORA)
    yield prefix + "kv_a_proj_with_mqa.weight", _matrix(generator, _KV_LORA + _ROPE, _HIDDEN)
    yield prefix + "kv_a_layernorm.weight", _norm(generator, _KV_LORA)
    yield prefix + "kv_b_proj.weight", _matrix(generator, _HEADS * (_NOPE + _VALUE), _KV_LORA)
    yield prefix + "o_proj.weight", _matrix(generator, _HIDDEN, _HEADS * _VALUE)


def _experts(generator: Generator, prefix: str) -> _Named:
    import torch

    yield prefix + "gate.weight", _matrix(generator, _EXPERTS, _HIDDEN)
    # float32 in real checkpoints too: the bias decides between experts whose scores are close
    yield prefix + "gate.e_score_correction_bias", torch.randn(_EXPERTS, generator=generator) * 0.01
    for expert in range(_EXPERTS):
        yield from _mlp(generator, f"{prefix}experts.{expert}.", _EXPERT_WIDTH)
    yield from _mlp(generator, prefix + "shared_experts.", _EXPERT_WIDTH)


def _mlp(generator: Generator, prefix: str, width: int) -> _Named:
    yield prefix + "gate_proj.weight", _matrix(generator, width, _HIDDEN)
    yield prefix + "up_proj.weight", _matrix(generator, width, _HIDDEN)
    yield prefix + "down_proj.weight", _matrix(generator, _HIDDEN, width)


def _matrix(generator: Generator, rows: int, columns: int) -> Tensor:
    import torch

    return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(torch.bfloat16)


def _norm(generator: Generator, width: int) -> Tensor:
    import torch

    return torch.empty(width).uniform_(0.5, 1.5, generator=generator).to(torch.bfloat16)
