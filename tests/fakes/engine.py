"""An engine whose faults are scripted: it proves what the client does when a real one misbehaves.

States are real tensors in real dumps; only the model is missing. Row t of layer k holds numbers that only token t and
layer k give, so that a row of another request or layer is told apart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from eaglehs.extraction.engines.protocol import Answer
from eaglehs.extraction.sink import write_dump
from eaglehs.schemas.dump import DumpName
from eaglehs.schemas.prompt import Prompt
from eaglehs.schemas.run import EngineFacts
from eaglehs.schemas.states import state_names

Fault = Callable[[Prompt, int, Answer], Answer]
"""(prompt, number of the try, honest answer) -> what the engine says instead; may raise."""


def states_of(token_ids: Sequence[int], layers: Sequence[int], hidden_size: int) -> dict[str, torch.Tensor]:
    """Return the bf16 states that the fake model gives these tokens."""
    ids = torch.as_tensor(list(token_ids), dtype=torch.float32)[:, None]
    positions = torch.arange(len(token_ids), dtype=torch.float32)[:, None]
    columns = torch.arange(hidden_size, dtype=torch.float32)[None]
    return {
        name: torch.sin((ids + 1) * (columns + 1) * (depth + 1) * 0.01 + positions).to(torch.bfloat16)
        for depth, name in enumerate(state_names(layers))
    }


def dump_prompt(spool: Path, prompt: Prompt, rid: str, layers: Sequence[int], hidden_size: int) -> Path:
    """Write the whole prompt's states as one dump."""
    return write_dump(
        spool,
        DumpName(rid=rid, start=0, end=prompt.num_tokens),
        layers=tuple(layers),
        prompt_tokens=prompt.num_tokens,
        input_ids=torch.as_tensor(list(prompt.input_ids), dtype=torch.int32),
        states=states_of(prompt.input_ids, layers, hidden_size),
    )


class FakeEngine:
    """Answers every prompt at once, unless `faults` has something for its key."""

    def __init__(self, spool: Path, *, layers: Sequence[int] = (1, 2), hidden_size: int = 32, concurrency: int = 4):
        spool.mkdir(parents=True, exist_ok=True)
        self.spool = spool
        self.layers = tuple(layers)
        self.hidden_size = hidden_size
        self.concurrency = concurrency
        self.faults: dict[str, Fault] = {}
        self.asked: Counter[str] = Counter()
        self.rids: list[str] = []
        self.under_way = 0
        self.most_under_way = 0

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(name="fake", versions={}, command=(), environment={}, device="cpu")

    async def capture(self, prompt: Prompt, rid: str) -> Answer:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            self.asked[prompt.key] += 1
            self.rids.append(rid)
            dump = dump_prompt(self.spool, prompt, rid, self.layers, self.hidden_size)
            answer = Answer(dumps=(dump,), next_token=5, cached_tokens=0)
            fault = self.faults.get(prompt.key)
            return fault(prompt, self.asked[prompt.key], answer) if fault else answer
        finally:
            self.under_way -= 1
