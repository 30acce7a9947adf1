"""A manifest of a small dataset, for what reads one and needs no shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eaglehs.schemas.manifest import Manifest, ShardEntry, Totals
from eaglehs.schemas.run import EngineFacts, ModelFacts, PromptFacts

SERVER_OPTIONS = (
    *("--model-path", "/models/kimi", "--revision", "0123456", "--host", "127.0.0.1", "--port", "31000"),
    *("--disable-radix-cache", "--tp-size", "8", "--chat-template=/home/me/kimi.jinja", "--mem-fraction-static", "0.9"),
)


def make_manifest(**changes: Any) -> Manifest:
    """Return a manifest of 3 samples and 42 tokens in two shards; `changes` replace fields."""
    model = ModelFacts(
        name="moonshotai/Kimi-K2.5",
        revision="0123456789abcdef0123456789abcdef01234567",
        architecture="KimiK25ForConditionalGeneration",
        num_layers=61,
        hidden_size=16,
        vocab_size=163_840,
        max_position=262_144,
    )
    prompts = PromptFacts(
        source="prompts.jsonl",
        fingerprint="00112233445566778899aabbccddeeff",
        num_prompts=4,
        num_tokens=50,
        num_trainable=25,
        skipped={"no trainable token": 2},
        tokenizer_hash="a" * 64,
        template_hash="b" * 64,
        loss_mask="assistant",
        max_tokens=8192,
    )
    engine = EngineFacts(
        name="sglang",
        versions={"torch": "2.9.1", "sglang": "0.5.14"},
        command=("python", "-m", "sglang.launch_server", *SERVER_OPTIONS),
        environment={"NCCL_DEBUG": "WARN"},
        device="8 x NVIDIA H200",
    )
    shards = (
        ShardEntry(name="data/train-00000.tar", num_samples=2, num_tokens=30, size_bytes=20_480, sha256="c" * 64),
        ShardEntry(name="data/train-00001.tar", num_samples=1, num_tokens=12, size_bytes=10_240, sha256="d" * 64),
    )
    manifest = Manifest(
        run_id="0a1b2c3d",
        created_at="2026-01-02T03:04:05Z",
        eaglehs_version="0.1.0",
        model=model,
        layers=(3, 31, 59),
        prompts=prompts,
        engine=engine,
        shard_size_bytes=2_000_000_000,
        shuffle_seed=None,
        failed={"dump is short": 1},
        state_norms={"layer_3": 1.5, "layer_31": 12.25, "layer_59": 80.0, "final": 33.0},
        totals=Totals(num_samples=3, num_tokens=42, num_trainable=21, size_bytes=30_720),
        shards=shards,
    )
    return replace(manifest, **changes)
