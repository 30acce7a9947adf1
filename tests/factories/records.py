"""Records of a small run, for tests that need one and do not care which."""

from eaglehs.schemas.manifest import Manifest, ShardEntry, Totals
from eaglehs.schemas.run import EngineFacts, ModelFacts, PromptFacts, RunRecord


def model_facts(**changes) -> ModelFacts:
    facts = {
        "name": "acme/tiny",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "architecture": "DeepseekV3ForCausalLM",
        "num_layers": 8,
        "hidden_size": 64,
        "vocab_size": 1024,
        "max_position": 4096,
    }
    return ModelFacts(**(facts | changes))


def prompt_facts(**changes) -> PromptFacts:
    facts = {
        "source": "prompts.jsonl",
        "fingerprint": "00112233445566778899aabbccddeeff",
        "num_prompts": 3,
        "num_tokens": 120,
        "num_trainable": 60,
        "skipped": {"empty": 1},
        "tokenizer_hash": "a" * 64,
        "template_hash": "b" * 64,
        "loss_mask": "assistant",
        "max_tokens": None,
    }
    return PromptFacts(**(facts | changes))


def engine_facts(**changes) -> EngineFacts:
    facts = {
        "name": "transformers",
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "command": (),
        "environment": {},
        "device": "cpu",
    }
    return EngineFacts(**(facts | changes))


def run_record(**changes) -> RunRecord:
    facts = {
        "run_id": "0123abcd",
        "created_at": "2026-11-29T12:00:00+00:00",
        "eaglehs_version": "0.1.0",
        "command": ("eaglehs", "extract", "--model", "acme/tiny", "--prompts", "prompts.jsonl"),
        "model": model_facts(),
        "layers": (1, 4, 6),
        "prompts": prompt_facts(),
        "engine": engine_facts(),
        "settings": {"max_failed": "10"},
        "starts": 1,
    }
    return RunRecord(**(facts | changes))


def manifest(**changes) -> Manifest:
    facts = {
        "run_id": "0123abcd",
        "created_at": "2026-11-29T12:00:00+00:00",
        "eaglehs_version": "0.1.0",
        "model": model_facts(),
        "layers": (1, 4, 6),
        "prompts": prompt_facts(),
        "engine": engine_facts(),
        "shard_size_bytes": 2_000_000_000,
        "shuffle_seed": None,
        "failed": {},
        "state_norms": {"layer_1": 8.0, "layer_4": 9.5, "layer_6": 11.0, "final": 7.25},
        "totals": Totals(num_samples=3, num_tokens=120, num_trainable=60, size_bytes=163_840),
        "shards": (
            ShardEntry(name="data/train-00000.tar", num_samples=3, num_tokens=120, size_bytes=163_840, sha256="c" * 64),
        ),
    }
    return Manifest(**(facts | changes))
