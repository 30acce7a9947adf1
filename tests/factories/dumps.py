"""Dumps of made-up states: real files in the real format, with values that each test can compute again."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from eaglehs.extraction.sink import write_dump
from eaglehs.schemas.dump import DumpName, RequestId
from eaglehs.schemas.prompt import Prompt
from eaglehs.schemas.states import layers_of, state_names

LAYERS = (2, 5, 9)
HIDDEN_SIZE = 16
VOCAB_SIZE = 1000
RUN_ID = "0123abcd"


def make_prompt(key: str = "p0", num_tokens: int = 12, *, sample_id: str | None = None) -> Prompt:
    """Return a prompt whose ids and mask follow from its key and length; its last token is always trainable."""
    random = torch.Generator().manual_seed(seed_of(key))
    ids = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=random, dtype=torch.int32)
    mask = torch.randint(0, 2, (num_tokens,), generator=random, dtype=torch.uint8)
    mask[-1:] = 1
    return Prompt(
        key=key,
        id=key if sample_id is None else sample_id,
        source=f"made-up.jsonl:{key}",
        input_ids=ids.numpy(),
        loss_mask=mask.numpy(),
    )


def make_states(
    key: str, num_tokens: int, *, layers: Sequence[int] = LAYERS, hidden_size: int = HIDDEN_SIZE
) -> dict[str, torch.Tensor]:
    """Return all states of a sample, bfloat16 [T, H], the same for the same key, length, layers and width."""
    random = torch.Generator().manual_seed(seed_of(key) + 1)
    return {
        name: torch.randn(num_tokens, hidden_size, generator=random).to(torch.bfloat16) for name in state_names(layers)
    }


def write_dumps(
    folder: Path,
    prompt: Prompt,
    states: dict[str, torch.Tensor],
    *,
    bounds: Sequence[int] | None = None,
    rid: str | None = None,
) -> list[Path]:
    """Write a sample's dumps, one a chunk, and return their paths in row order.

    `bounds` are the chunks' borders, such as (0, 64, 128, 150); default one chunk.
    """
    borders = (0, prompt.num_tokens) if bounds is None else tuple(bounds)
    ids = torch.as_tensor(prompt.input_ids, dtype=torch.int32)
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_dump(
            folder,
            DumpName(rid=rid or str(RequestId(run=RUN_ID, key=prompt.key, attempt=0)), start=start, end=end),
            layers=layers_of(states),
            prompt_tokens=prompt.num_tokens,
            input_ids=ids[start:end],
            states={name: state[start:end] for name, state in states.items()},
        )
        for start, end in pairwise(borders)
    ]


def seed_of(key: str) -> int:
    """Return a seed that depends on the key alone, unlike `hash`."""
    return int.from_bytes(key.encode()[-7:], "little")
