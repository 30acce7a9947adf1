"""Prompts of token ids, for tests that need no tokenizer."""

import random

import numpy as np
from eaglehs.schemas.prompt import Prompt


def make_prompt(key: str = "a", num_tokens: int = 6, *, vocab_size: int = 500, seed: int = 0) -> Prompt:
    """Return a prompt of random ids whose second half is trained on."""
    draw = random.Random(f"{seed}{key}")
    return Prompt(
        key=key,
        id=key,
        source=f"prompts.jsonl:{key}",
        input_ids=np.array([draw.randrange(vocab_size) for _ in range(num_tokens)], dtype=np.int32),
        loss_mask=np.array([int(2 * t >= num_tokens) for t in range(num_tokens)], dtype=np.uint8),
    )


def make_prompts(count: int, *, seed: int = 0) -> list[Prompt]:
    """Return prompts of 3 to 40 tokens with keys p000, p001, ..."""
    draw = random.Random(seed)
    return [make_prompt(f"p{number:03d}", draw.randint(3, 40), seed=seed) for number in range(count)]
