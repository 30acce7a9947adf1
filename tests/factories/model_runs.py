"""Runs of a real tiny model: what transformers itself gives, stored as `extract` would, or with a fault put in."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from eaglehs.extraction.model_facts import read_model_facts
from eaglehs.schemas.prompt import Prompt

from tests.factories.dumps import write_dumps
from tests.factories.runs import SyntheticRun, append_ledger, change_record, start_run

LAYERS = (2, 4, 5)
LENGTHS = {"p0": 9, "p1": 30, "p2": 24, "p3": 61}

States = dict[str, torch.Tensor]
Fault = Callable[["Computed"], States]
"""What is stored in place of the right states."""


class Computed:
    """What transformers in bfloat16 computes for one prompt."""

    def __init__(self, model: Path, prompt: Prompt) -> None:
        loaded = _load(model)
        kept: list[torch.Tensor] = []
        hook = loaded.model.layers[-1].register_forward_hook(lambda *seen: kept.append(seen[2]))
        with torch.no_grad():
            output = loaded(torch.tensor([list(prompt.input_ids)]), output_hidden_states=True)
            hook.remove()
            self.hidden_states = [state[0] for state in output.hidden_states]
            last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
            self.before_norm = last[0]
            self.normed_twice = loaded.model.norm(self.hidden_states[-1])
        self.next_token = int(output.logits[0, -1].argmax())

    def states(self, **instead: torch.Tensor) -> States:
        """The right states by name, `instead` in place of some."""
        right = {f"layer_{layer}": self.hidden_states[layer] for layer in LAYERS}
        return {**right, "final": self.hidden_states[-1], **instead}


def make_model_prompts(lengths: Mapping[str, int] = LENGTHS, vocab_size: int = 1000) -> list[Prompt]:
    """Return prompts of random ids; the second half of each is trained on."""
    prompts = []
    for key, length in lengths.items():
        ids = random.Random(key).choices(range(10, vocab_size), k=length)
        mask = [int(2 * row >= length) for row in range(length)]
        prompts.append(Prompt(key=key, id=key, source=f"made-up.jsonl:{key}", input_ids=ids, loss_mask=mask))
    return prompts


def make_model_run(
    root: Path, model: Path, *, fault: Fault = Computed.states, swap: Mapping[str, str] | None = None
) -> SyntheticRun:
    """Write a run of `model` over `make_model_prompts()`.

    `fault` gives what is stored; `swap` names keys that hold the states of another key, cut or doubled to fit.
    """
    prompts = make_model_prompts()
    run = start_run(root, prompts, layers=LAYERS, hidden_size=128)
    facts = read_model_facts(str(model))
    change_record(run, model=facts, prompts=replace(run.record.prompts))
    computed = {prompt.key: _compute(model, prompt.key) for prompt in prompts}
    for prompt in prompts:
        states = fault(computed[(swap or {}).get(prompt.key, prompt.key)])
        fitting = {name: _fit(state, prompt.num_tokens) for name, state in states.items()}
        step = -(-prompt.num_tokens // 2)
        bounds = sorted({0, step, prompt.num_tokens})
        paths = write_dumps(run.folder.dump_path(prompt.key, "x").parent, prompt, fitting, bounds=bounds)
        run.next_tokens[prompt.key] = computed[prompt.key].next_token
        append_ledger(run, prompt, dumps=paths, next_token=computed[prompt.key].next_token)
    return run


def _fit(state_TH: torch.Tensor, num_rows: int) -> torch.Tensor:
    return state_TH.repeat(-(-num_rows // len(state_TH)), 1)[:num_rows].contiguous()


@cache
def _compute(model: Path, key: str) -> Computed:
    return Computed(model, next(prompt for prompt in make_model_prompts() if prompt.key == key))


@cache
def _load(model: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
