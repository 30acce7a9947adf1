"""Random checkpoints of DeepSeek-V3's and Kimi-K2.5's shape at full width, made on the GPU in seconds.

    python -m bench.gpu.models OUT [--layers 8] [--experts 32] [--expert-width 512] [--kimi-k25 DIR] [--config-only]

Width 7168, MLA and routing as Kimi-K2 has them. Norm weights are random in 0.5..1.5, so that a state before a norm and
one after it can be told apart. `--kimi-k25 DIR` writes the same weights again under `language_model.` with a
KimiK25ForConditionalGeneration config; `--config-only` is for `--load-format dummy`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, DENSE_WIDTH, HEADS, VOCAB = 7168, 18432, 64, 32768
Q_RANK, KV_RANK, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What may differ between the models; the first layer is dense."""

    layers: int
    experts: int
    expert_width: int


class Random:
    """Seeded bf16 weights, made on the GPU if there is one."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.generator = torch.Generator(device=self.device)
        self.generator.manual_seed(0)

    def matrix(self, *shape: int) -> Tensor:
        """Normal, standard deviation 0.02."""
        drawn = torch.randn(*shape, generator=self.generator, device=self.device)
        return (drawn * 0.02).to(torch.bfloat16).cpu()

    def norm(self, width: int) -> Tensor:
        """Uniform in 0.5..1.5."""
        drawn = torch.rand(width, generator=self.generator, device=self.device)
        return (0.5 + drawn).to(torch.bfloat16).cpu()

    def bias(self, width: int) -> Tensor:
        """Small, in float32 as the router wants it."""
        return (torch.randn(width, generator=self.generator, device=self.device) * 0.01).float().cpu()


def config(shape: Shape) -> dict[str, object]:
    """Return config.json of the DeepSeek-V3 form."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": DENSE_WIDTH,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_shared_experts": 1,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
        "kv_lora_rank": KV_RANK,
        "q_lora_rank": Q_RANK,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "ep_size": 1,
        "pretraining_tp": 1,
    }


def kimi_config(shape: Shape) -> dict[str, object]:
    """Return config.json of the Kimi-K2.5 form; its vision tower is small and has no weights."""
    vision = {
        "model_type": "kimi_k25",
        "num_hidden_layers": 2,
        "vt_num_hidden_layers": 2,
        "hidden_size": 128,
        "mm_hidden_size": 128,
        "vt_hidden_size": 128,
        "num_attention_heads": 2,
        "vt_num_attention_heads": 2,
        "intermediate_size": 256,
        "vt_intermediate_size": 256,
        "text_hidden_size": WIDTH,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "text_config": config(shape),
        "vision_config": vision,
        "media_placeholder_token_id": VOCAB - 3,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def layer_weights(number: int, shape: Shape, draw: Random) -> Weights:
    """Return the weights of one decoder layer, named as in the checkpoint."""
    layer = f"model.layers.{number}."
    attention = f"{layer}self_attn."
    weights = {
        f"{layer}input_layernorm.weight": draw.norm(WIDTH),
        f"{layer}post_attention_layernorm.weight": draw.norm(WIDTH),
        f"{attention}q_a_proj.weight": draw.matrix(Q_RANK, WIDTH),
        f"{attention}q_a_layernorm.weight": draw.norm(Q_RANK),
        f"{attention}q_b_proj.weight": draw.matrix(HEADS * (NOPE + ROPE), Q_RANK),
        f"{attention}kv_a_proj_with_mqa.weight": draw.matrix(KV_RANK + ROPE, WIDTH),
        f"{attention}kv_a_layernorm.weight": draw.norm(KV_RANK),
        f"{attention}kv_b_proj.weight": draw.matrix(HEADS * (NOPE + VALUE), KV_RANK),
        f"{attention}o_proj.weight": draw.matrix(WIDTH, HEADS * VALUE),
    }
    if number == 0:
        return weights | mlp(f"{layer}mlp.", DENSE_WIDTH, draw)
    weights[f"{layer}mlp.gate.weight"] = draw.matrix(shape.experts, WIDTH)
    weights[f"{layer}mlp.gate.e_score_correction_bias"] = draw.bias(shape.experts)
    for expert in range(shape.experts):
        weights |= mlp(f"{layer}mlp.experts.{expert}.", shape.expert_width, draw)
    return weights | mlp(f"{layer}mlp.shared_experts.", shape.expert_width, draw)


def mlp(prefix: str, width: int, draw: Random) -> Weights:
    """Return the three matrices of a gated MLP."""
    return {
        f"{prefix}gate_proj.weight": draw.matrix(width, WIDTH),
        f"{prefix}up_proj.weight": draw.matrix(width, WIDTH),
        f"{prefix}down_proj.weight": draw.matrix(WIDTH, width),
    }


def parts(shape: Shape, draw: Random) -> Iterator[Weights]:
    """Yield the checkpoint part by part: embeddings, layers, head."""
    yield {"model.embed_tokens.weight": draw.matrix(VOCAB, WIDTH)}
    for number in range(shape.layers):
        yield layer_weights(number, shape, draw)
    yield {"model.norm.weight": draw.norm(WIDTH), "lm_head.weight": draw.matrix(VOCAB, WIDTH)}


def write_model(folder: Path, shape: Shape, kimi_folder: Path | None) -> None:
    """Write the checkpoint, and its Kimi-K2.5 twin if asked."""
    prefixes = {folder: ""} | ({kimi_folder: "language_model."} if kimi_folder else {})
    indices: dict[Path, dict[str, str]] = {target: {} for target in prefixes}
    num_parts = shape.layers + 2
    for number, weights in enumerate(parts(shape, Random())):
        name = f"model-{number + 1:05d}-of-{num_parts:05d}.safetensors"
        for target, prefix in prefixes.items():
            target.mkdir(parents=True, exist_ok=True)
            renamed = {prefix + key: value for key, value in weights.items()}
            save_file(renamed, target / name, metadata={"format": "pt"})
            indices[target] |= dict.fromkeys(renamed, name)
    for target, weight_map in indices.items():
        index = {"metadata": {}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--expert-width", type=int, default=512)
    parser.add_argument("--kimi-k25", type=Path)
    parser.add_argument("--config-only", action="store_true")
    given = parser.parse_args()
    shape = Shape(layers=given.layers, experts=given.experts, expert_width=given.expert_width)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "config.json").write_text(json.dumps(config(shape), indent=1))
    if given.kimi_k25:
        given.kimi_k25.mkdir(parents=True, exist_ok=True)
        (given.kimi_k25 / "config.json").write_text(json.dumps(kimi_config(shape), indent=1))
    if not given.config_only:
        write_model(given.out, shape, given.kimi_k25)


if __name__ == "__main__":
    main()
