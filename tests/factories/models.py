"""Tiny random models that real SGLang and transformers both load: wrong layers and wrong norms can't pass for right."""

from __future__ import annotations

from pathlib import Path

import torch

from eaglehs.demo.tiny_model import write_tiny_model

NUM_LAYERS = 8
LLAMA_VOCAB = 512
LLAMA_MAX_POSITION = 4096


def write_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """Write an 8-layer Llama of width 128 in bf16, with norm weights in 0.5..1.5, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=LLAMA_VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LLAMA_MAX_POSITION,
        initializer_range=0.12,  # about 1 / sqrt(128): every layer moves the residual stream visibly
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_tiny_deepseek(folder: Path, *, seed: int = 0) -> Path:
    """Write the demo's Kimi-K2-shaped DeepSeek-V3 (8 layers, 1 dense, MLA, YaRN, 8 experts) and return its folder."""
    write_tiny_model(folder, seed=seed)
    return folder


def write_tiny_qwen_moe(folder: Path, *, seed: int = 0) -> Path:
    """Write an 8-layer Qwen3-MoE of width 128 in bf16: SGLang's file for it marks layers one by one, not by a list."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=LLAMA_VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LLAMA_MAX_POSITION,
        initializer_range=0.12,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
