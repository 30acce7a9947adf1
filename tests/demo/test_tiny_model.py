"""The tiny model is Kimi-shaped, the same for the same seed, and tells neighbouring hook points apart."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

from eaglehs.demo.tiny_model import MAX_POSITION, NUM_LAYERS, VOCAB_SIZE, write_tiny_model


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes(tiny_model: Path, tmp_path: Path):
    write_tiny_model(tmp_path / "again")
    assert file_bytes(tmp_path / "again") == file_bytes(tiny_model)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(tiny_model: Path, tmp_path: Path):
    write_tiny_model(tmp_path / "other", seed=1)
    here, there = file_bytes(tiny_model), file_bytes(tmp_path / "other")
    assert here["model.safetensors"] != there["model.safetensors"]
    assert here["tokenizer.json"] == there["tokenizer.json"]


def test_the_config_has_what_sglang_needs_of_a_kimi_shape(tiny_model: Path):
    config = json.loads((tiny_model / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["num_hidden_layers"], config["first_k_dense_replace"], config["vocab_size"]) == (8, 1, VOCAB_SIZE)
    assert (config["moe_layer_freq"], config["topk_method"], config["scoring_func"]) == (1, "noaux_tc", "sigmoid")
    yarn = config["rope_scaling"]
    assert yarn["type"] == "yarn"
    assert yarn["factor"] * yarn["original_max_position_embeddings"] == MAX_POSITION
    assert yarn["mscale"] == yarn["mscale_all_dim"] == 1.0


def test_weights_are_bf16_and_norm_weights_are_far_from_one(tiny_model: Path):
    weights = load_file(tiny_model / "model.safetensors")
    float32 = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16, torch.float32}
    assert all(name.endswith("e_score_correction_bias") for name in float32)
    norm = weights["model.norm.weight"].float()
    assert norm.min() >= 0.5
    assert norm.max() <= 1.5
    assert norm.std() > 0.2


def test_another_user_can_read_every_file(tiny_model: Path):
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in tiny_model.iterdir())


@pytest.fixture(scope="module")
def states(tiny_model: Path) -> dict[torch.dtype, tuple[torch.Tensor, ...]]:
    """hidden_states of 150 tokens, in bfloat16 and float32."""
    ids_1T = (torch.arange(150)[None] * 37 + 5) % VOCAB_SIZE
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).eval()
        assert isinstance(model, DeepseekV3ForCausalLM)
        with torch.inference_mode():
            found[dtype] = model(ids_1T, output_hidden_states=True, use_cache=False).hidden_states
    return found


def median_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median().item()


def test_every_layer_moves_the_stream_far_more_than_bf16_noise_does(states):
    bf16, fp32 = states[torch.bfloat16], states[torch.float32]
    assert len(bf16) == NUM_LAYERS + 1
    for k, state in enumerate(bf16):
        noise = median_error(state, fp32[k])
        nearest_other = min(median_error(state, fp32[j]) for j in range(NUM_LAYERS + 1) if j != k)
        assert nearest_other > 3 * noise, f"state {k} could pass for a neighbour"


def test_the_tokenizer_fits_the_vocabulary_and_brings_text_back(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len(tokenizer) <= VOCAB_SIZE
    text = "state 59 ≠ layer 59: 日本語, naïve, 😄\n\tdef f(x): return x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_markup_is_one_token_each_and_in_kimis_order(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_system|>system<|im_middle|>a<|im_end|><|im_user|>user<|im_middle|>b<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    assert tokens[0] == "<|im_system|>"
    assert tokens.count("<|im_end|>") == 2
    assert tokens[-1] == "<|im_middle|>"


def test_the_mask_covers_what_the_assistant_wrote_with_its_thought_and_its_end(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "reasoning_content": "easy", "content": "good day"},
    ]
    row = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    trained = [token for token, mask in zip(row["input_ids"], row["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == "<think>easy</think>good day<|im_end|>"


def test_an_unknown_role_is_refused_by_the_template(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(Exception, match="role tool is not one of"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
