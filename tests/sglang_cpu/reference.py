"""transformers' own states of a prompt, and how near captured states come to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`hidden_states` of one prompt, each [T, H] float32: index k enters layer k, the last is past the last norm."""

    exact: tuple[Tensor, ...]
    """From the model in float32."""

    rounded: tuple[Tensor, ...]
    """From the model in bfloat16: how far transformers itself is off."""

    lm_head: Tensor
    """[V, H]."""

    def index_of(self, name: str) -> int:
        """Return the index of a dump's state."""
        return len(self.exact) - 1 if name == "final" else int(name.removeprefix("layer_"))

    def errors_of(self, state_TH: Tensor, index: int, *, first_row: int = 0) -> Tensor:
        """Return the relative error of each row, [T]; the rows begin at `first_row` of the prompt."""
        return _errors(state_TH.float(), self.exact[index][first_row:])

    def own_errors(self, index: int) -> Tensor:
        """Return the same of transformers in bfloat16."""
        return _errors(self.rounded[index], self.exact[index])

    def nearest_index(self, state_TH: Tensor) -> int:
        """Return the index whose state is the nearest, by the median over rows."""
        return min(range(len(self.exact)), key=lambda index: float(self.errors_of(state_TH, index).median()))

    def is_next_token(self, token: int, final_TH: Tensor) -> bool:
        """Tell whether the LM head puts `token` first after the last row, or level with the first in bfloat16.

        The server rounds its logits to bfloat16, in steps of 1/128 of a value at most; in a random model the first
        two are now and then nearer than that.
        """
        logits_V = final_TH[-1].float() @ self.lm_head.T
        return bool(logits_V[token] >= logits_V.max() * (1 - 1 / 128))


class ReferenceModel:
    """One model in both precisions, as transformers runs it."""

    def __init__(self, folder: Path) -> None:
        """Load both."""
        from transformers import AutoModelForCausalLM

        self._exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    @torch.no_grad()
    def of(self, input_ids: Sequence[int]) -> Reference:
        """Run one prompt through both."""
        ids_1T = torch.tensor([list(input_ids)])
        exact, rounded = (
            model.model(ids_1T, output_hidden_states=True).hidden_states for model in (self._exact, self._rounded)
        )
        return Reference(
            exact=tuple(state[0] for state in exact),
            rounded=tuple(state[0].float() for state in rounded),
            lm_head=self._rounded.lm_head.weight.detach().float(),
        )


def _errors(found_TH: Tensor, exact_TH: Tensor) -> Tensor:
    return (found_TH - exact_TH).norm(dim=-1) / exact_TH.norm(dim=-1)
