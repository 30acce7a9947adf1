"""Made-up runs and datasets of a real one's shape for the benches: three states and `final` of width 7168."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from eaglehs.cards.write import write_card
from eaglehs.schemas.manifest import DatasetFolder
from eaglehs.schemas.states import state_names

from tests.factories.datasets import SyntheticDataset
from tests.factories.dumps import make_prompt, write_dumps
from tests.factories.packing import pack_by_hand
from tests.factories.runs import SyntheticRun, append_ledger, start_run

HIDDEN_SIZE = 7168
LAYERS = (3, 31, 59)
TOKEN_BYTES = 5 + 2 * HIDDEN_SIZE * (len(LAYERS) + 1)


def lengths_of(total_bytes: int) -> list[int]:
    """Return tokens of samples that add up to about `total_bytes`: lognormal, 1,730 on average, as in chat data."""
    lengths: list[int] = []
    random = np.random.default_rng(0)
    while sum(lengths) * TOKEN_BYTES < total_bytes:
        lengths.append(int(np.clip(random.lognormal(7.25, 0.65), 200, 8192)))
    return lengths


def make_dumped_run(root: Path, total_bytes: int) -> SyntheticRun:
    """Write a finished run of about `total_bytes` of dumps in `root`, one dump a sample, as `extract` leaves it."""
    prompts = [make_prompt(f"p{number}", length) for number, length in enumerate(lengths_of(total_bytes))]
    run = start_run(root, prompts, layers=LAYERS, hidden_size=HIDDEN_SIZE)
    noise = torch.randn(8192 + 8, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    for prompt in prompts:
        states = {name: noise[place : place + prompt.num_tokens] for place, name in enumerate(state_names(LAYERS))}
        paths = write_dumps(run.folder.dump_path(prompt.key, "x").parent, prompt, states)
        append_ledger(run, prompt, dumps=paths, next_token=1)
    return run


def make_dataset(root: Path, lengths: Sequence[int]) -> SyntheticDataset:
    """Pack a dataset of samples of so many tokens in `root`/dataset, shards of 2 GB at most, unless it is there."""
    prompts = [make_prompt(f"p{number}", length) for number, length in enumerate(lengths)]
    run = start_run(root / "run", prompts, layers=LAYERS, hidden_size=HIDDEN_SIZE)
    run.next_tokens = dict.fromkeys((prompt.key for prompt in prompts), 1)
    pool = np.random.default_rng(1).integers(0, 0x7F80, (8192 + 97 * 4, HIDDEN_SIZE), dtype=np.uint16)

    def bits(key: str) -> dict[str, np.ndarray]:
        prompt = SyntheticRun.prompt(run, key)
        rows = prompt.num_tokens
        states = (*(f"layer_{layer}" for layer in LAYERS), "final")
        return {
            "input_ids": np.asarray(prompt.input_ids, dtype="<i4")[:, None],
            "loss_mask": np.asarray(prompt.loss_mask, dtype="|u1")[:, None],
            **{name: pool[97 * number : 97 * number + rows] for number, name in enumerate(states)},
        }

    run.bits = bits  # type: ignore[method-assign]
    dataset = SyntheticDataset(folder=DatasetFolder(root / "dataset"), run=run)
    if not dataset.folder.manifest.exists():
        pack_by_hand(run, dataset.root, 2_000_000_000)
        write_card(dataset.root)
    return dataset
