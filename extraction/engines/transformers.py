"""The embedded engine: transformers in this process, one prompt at a time, on the CPU or one GPU.

It is the reference that SGLang's states are compared with, and what a machine without SGLang gets. Prompts never
share a batch, so the same prompt gives the same bits in every run.
"""

from __future__ import annotations

import asyncio
import inspect
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ...schemas.counts import counted
from ...schemas.dump import DumpName
from ...schemas.errors import DataError
from ...schemas.prompt import Prompt
from ...schemas.run import EngineFacts
from ...schemas.states import check_layers
from ..sink import write_dump
from .model_load import ModelSource, device_name, load_config, load_model, pick_device
from .protocol import Answer
from .taps import Taps, check_taps


class PromptRefusedError(DataError):
    """A prompt that the model can't run right: no tokens, too many, or ids that it does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSettings:
    """What to load, what to keep and where to put it."""

    model: str
    """Folder or Hub name."""

    layers: tuple[int, ...]
    spool: Path
    """Folder for the dumps; made if missing."""

    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"
    """`auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:1`."""


class TransformersEngine:
    """Engine (protocol.py) that runs prompts through a transformers model in a thread of its own."""

    concurrency = 1

    def __init__(self, settings: TransformersSettings) -> None:
        """Load the model, hook into it and prove that the hooks hold the right states. Takes as long as loading does.

        Raises:
            UsageError: a layer is out of range.
            ModelLoadError: the model can't be loaded.
            UnknownBackboneError, WrongStateError: its states can't be taken right; see taps.py.
        """
        self._settings = settings
        self._device = pick_device(settings.device)
        source = ModelSource(
            model=settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        config = load_config(source)
        self._text_config = config.get_text_config()
        num_layers: int = self._text_config.num_hidden_layers
        layers = check_layers(settings.layers, num_layers)
        settings.spool.mkdir(parents=True, exist_ok=True)
        self._model = load_model(source, config, self._device)
        self._taps = Taps(self._model, layers, num_layers)
        check_taps(self._model, self._taps, self._text_config.vocab_size)
        self._last_logits_only = _last_logits_only(self._model)
        # One thread, so that prompts never overlap: the taps hold the states of one forward pass.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eaglehs-transformers")

    @property
    def facts(self) -> EngineFacts:
        """Versions and device, for run.json."""
        return EngineFacts(
            name="transformers",
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            command=(),
            environment={},
            device=device_name(self._device),
        )

    async def capture(self, prompt: Prompt, rid: str) -> Answer:
        """Run one prompt; its states are one dump in the spool when this returns.

        Raises:
            PromptRefusedError: the prompt is empty, longer than the model's context or holds an unknown id.
            WrongStateError: a state did not come as it did at load.
            DumpWriteError: the spool is full or gone.
        """
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._capture, prompt, rid)

    def close(self) -> None:
        """Wait for the prompt that is under way and let the thread go."""
        self._worker.shutdown()

    def _capture(self, prompt: Prompt, rid: str) -> Answer:
        ids = [int(token) for token in prompt.input_ids]
        self._check_prompt(prompt.key, ids)
        next_token = self._forward(prompt.key, ids)
        path = write_dump(
            self._settings.spool,
            DumpName(rid=rid, start=0, end=len(ids)),
            layers=self._taps.layers,
            prompt_tokens=len(ids),
            input_ids=torch.tensor(ids, dtype=torch.int32),
            states=self._taps.take(),
        )
        return Answer(dumps=(path,), next_token=next_token, cached_tokens=0)

    @torch.inference_mode()
    def _forward(self, key: str, ids: Sequence[int]) -> int:
        """Run the model over `ids` and return the likeliest next token; the taps then hold the states."""
        ids_1T = torch.tensor([ids], device=self._device)
        try:
            logits_1TV = self._model(input_ids=ids_1T, use_cache=False, **self._last_logits_only).logits
        except RuntimeError as fault:
            if not _is_out_of_memory(fault):
                raise
            torch.cuda.empty_cache()
            raise PromptRefusedError(
                f"{key}: {counted(len(ids), 'token does', 'tokens do')} not fit into the memory of {self._device}",
                mend="Cut prompts with --max-tokens, or use --engine sglang, which prefills in chunks",
            ) from fault
        return int(logits_1TV[0, -1].argmax())

    def _check_prompt(self, key: str, ids: Sequence[int]) -> None:
        if not ids:
            raise PromptRefusedError(f"{key}: the prompt has no tokens")
        vocab_size: int = self._text_config.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                raise PromptRefusedError(
                    f"{key}: token {token} at position {position} is outside the model's vocabulary of {vocab_size}",
                    why="The prompts were made with another model's tokenizer",
                )
        longest = getattr(self._text_config, "max_position_embeddings", None)
        if longest is not None and len(ids) > longest:
            raise PromptRefusedError(
                f"{key}: {counted(len(ids), 'token is', 'tokens are')} more than the model's context of {longest:,}",
                mend=f"Cut prompts with --max-tokens {longest}",
            )


def _last_logits_only(model: Any) -> dict[str, int]:
    """Return the argument that spares the logits of all rows but the last: 2.7 GB for 8,192 rows of Kimi-K2.5."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _is_out_of_memory(fault: RuntimeError) -> bool:
    return isinstance(fault, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(fault)
