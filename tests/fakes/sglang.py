"""The few SGLang objects that the plugin touches, for faults that a real server can't be made to show on a CPU.

They prove nothing about SGLang: tests/extraction/test_sglang_*.py run the real one.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HIDDEN = 8


class ForwardMode(Enum):
    """The names that matter."""

    EXTEND = auto()
    MIXED = auto()
    DECODE = auto()
    TARGET_VERIFY = auto()


@dataclass
class FakeBatch:
    """SGLang's ForwardBatch, as far as it is read."""

    rids: list[str] | None
    extend_seq_lens_cpu: list[int] | None
    extend_prefix_lens_cpu: list[int] | None
    input_ids: Tensor
    forward_mode: ForwardMode = ForwardMode.EXTEND


def batch_of(*parts: tuple[str, int, int], mode: ForwardMode = ForwardMode.EXTEND) -> FakeBatch:
    """Return a batch of (request id, first position, rows)."""
    return FakeBatch(
        rids=[rid for rid, _, _ in parts],
        extend_prefix_lens_cpu=[start for _, start, _ in parts],
        extend_seq_lens_cpu=[rows for _, _, rows in parts],
        input_ids=torch.arange(sum(rows for _, _, rows in parts)),
        forward_mode=mode,
    )


class FakeBackbone(nn.Module):
    """A model's layers: gives (hidden, states) where it was told to capture, as SGLang's do."""

    def __init__(self, num_layers: int = 8, *, packed: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        """`packed`: one [T, L * H] tensor, as newer model files give it."""
        super().__init__()
        self.layers_to_capture: Any = []
        self.num_layers = num_layers
        self.packed = packed
        self.dtype = dtype

    def forward(self, batch: FakeBatch) -> Any:
        """State k of token t is k + t / 100; the final one is -t / 100."""
        rows_T1 = torch.arange(len(batch.input_ids), dtype=torch.float32)[:, None] / 100
        hidden = (-rows_T1).expand(-1, HIDDEN).to(self.dtype)
        states = [(rows_T1 + k).expand(-1, HIDDEN).to(self.dtype) for k in self.layers_to_capture or ()]
        if not states:
            return hidden
        return hidden, torch.cat(states, dim=-1) if self.packed else states


class FakeModel(nn.Module):
    """A causal LM around a backbone; answers with what its LM head would get."""

    def __init__(self, backbone: nn.Module) -> None:
        """`backbone` is its `model`, as in SGLang."""
        super().__init__()
        self.model = backbone

    def forward(self, batch: FakeBatch) -> Any:
        """Return the backbone's output."""
        return self.model(batch)


@dataclass
class FakeRunner:
    """SGLang's ModelRunner after load_model."""

    model: nn.Module = field(default_factory=lambda: FakeModel(FakeBackbone()))
    settings: dict[str, Any] = field(default_factory=dict)
    tp_rank: int = 0
    is_draft_worker: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    num_layers: int = 8

    @property
    def server_args(self) -> Any:
        """The settings, as the newer versions show them."""
        return SimpleNamespace(resolved_dict=lambda: {"chunked_prefill_size": 64, **self.settings})

    @property
    def model_config(self) -> Any:
        """What is read of the model's config."""
        text = SimpleNamespace(num_hidden_layers=self.num_layers, hidden_size=HIDDEN)
        return SimpleNamespace(hf_text_config=text, dtype=self.dtype)


@dataclass
class FakeHooks:
    """SGLang's HookRegistry: keeps what was registered."""

    registered: list[tuple[str, Callable[..., Any], str]] = field(default_factory=list)

    def register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        """Keep one hook."""
        self.registered.append((target, hook, kind))

    def call(self, ending: str, kind: str, *args: Any) -> None:
        """Call the hooks of the target that ends so."""
        for target, hook, found in self.registered:
            if target.endswith(ending) and found == kind:
                hook(*args)


def install_hooks(monkeypatch: pytest.MonkeyPatch) -> FakeHooks:
    """Let `import sglang.srt.plugins.hook_registry` find the fake for the length of a test."""
    hooks = FakeHooks()
    names = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].__dict__.update(HookRegistry=hooks, HookType=SimpleNamespace(AFTER="after", BEFORE="before"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return hooks


def run_forward(hooks: FakeHooks, runner: FakeRunner, batch: FakeBatch, prompts: Sequence[tuple[str, int]] = ()) -> Any:
    """Do what SGLang does for one batch: build it, run the model through `ModelRunner.forward`, return the output."""
    requests = [SimpleNamespace(rid=rid, origin_input_ids=range(length)) for rid, length in prompts]
    if requests:
        hooks.call("init_new", "after", batch, FakeBatch, SimpleNamespace(reqs=requests), runner)
    hooks.call("ModelRunner.forward", "before", runner, batch)
    output = runner.model(batch)
    hooks.call("ModelRunner.forward", "after", output, runner, batch)
    return output
