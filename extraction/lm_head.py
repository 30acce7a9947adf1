"""The LM head alone, out of a model's safetensors: what the final state must be the input of.

The engine's own next token and `argmax(lm_head(final[-1]))` come by two ways from the same place. They differ if
`final` is not the LM head's input (no norm, or two), or if the rows are shifted. The head is one tensor (2.3 GB for
Kimi-K2.5), mapped and not read whole before it is needed.

Shape legend: T tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..schemas.counts import counted
from ..schemas.errors import EaglehsError
from ..schemas.json_text import parse_json
from ..schemas.run import ModelFacts

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TIE = 1 / 128
"""Two logits are level if they are as near as one step of bfloat16, in which servers round them."""

_BLOCK_BYTES = 8_000_000
"""Bytes of the head in float32 at once: few enough for a core's cache, where a row of states costs 0.6 s of one core
with a head of Kimi-K2.5's shape; with blocks of 470 MB it is 2.2 s."""

_BLOCK_STATES = 64
"""Rows whose logits are in memory at once: 42 MB of Kimi-K2.5's."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class NoHeadError(EaglehsError):
    """The LM head can't be had from the files at hand; a reason to leave its check out, never to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmHead:
    """The LM head of one model."""

    weight: Tensor
    """[V, H]; mapped, in the checkpoint's dtype."""

    bias: Tensor | None = None
    """[V]."""

    def logits(self, final_TH: Tensor) -> Tensor:
        """Return the logits of final states, float32 [T, V]; summed in float32, in blocks of the vocabulary."""
        states_TH = final_TH.to(self.weight.device).float()
        block_rows = max(1, _BLOCK_BYTES // (4 * self.weight.shape[1]))
        blocks = [states_TH @ block.float().T for block in torch.split(self.weight, block_rows)]
        logits_TV = torch.cat(blocks, dim=-1)
        return (logits_TV if self.bias is None else logits_TV + self.bias.float()).cpu()

    def likeliest(self, final_TH: Tensor) -> Tensor:
        """Return the likeliest next token after each row, int64 [T]."""
        return torch.cat([self.logits(rows_TH).argmax(dim=-1) for rows_TH in torch.split(final_TH, _BLOCK_STATES)])

    def judge(self, token: int, final_H: Tensor) -> Verdict:
        """Hold a next token against the final state that it should come from."""
        logits_V = self.logits(final_H[None])[0]
        if not 0 <= token < len(logits_V):
            return Verdict(token=token, likeliest=int(logits_V.argmax()), rank=len(logits_V), is_level=False)
        best = logits_V.max()
        return Verdict(
            token=token,
            likeliest=int(logits_V.argmax()),
            rank=int((logits_V > logits_V[token]).sum()),
            is_level=bool(logits_V[token] >= best - best.abs() * TIE),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one stored next token stands in what the LM head makes of the stored final state."""

    token: int
    likeliest: int
    rank: int
    """Tokens that are likelier; 0 for the likeliest."""

    is_level: bool
    """Whether it is the likeliest, or level with it."""


def open_lm_head(model: ModelFacts) -> LmHead:
    """Map the LM head of a model whose files are on this machine; nothing is fetched and no code runs.

    Raises:
        NoHeadError: the files are not here, no safetensors, or the head is quantized, tied to other names, or of
            another shape.
    """
    config = _read_json(_local_file(model, "config.json"))
    if any(part.get("final_logit_softcapping") for part in _parts(config)):
        raise NoHeadError("the model bends its logits (final_logit_softcapping), so that likely tokens come level")
    names = _tensor_files(model)
    name = _head_name(names, is_tied=_is_tied(config))
    weight = _tensor(_local_file(model, names[name]), name)
    if weight.dtype not in _FLOATS:
        raise NoHeadError(f"{name} is {weight.dtype}: quantized")
    if weight.dim() != 2 or weight.shape[0] < model.vocab_size or weight.shape[1] != model.hidden_size:
        raise NoHeadError(
            f"{name} has shape {list(weight.shape)}, expected [{model.vocab_size} or more, {model.hidden_size}]"
        )
    bias_name = name.removesuffix("weight") + "bias"
    bias = _tensor(_local_file(model, names[bias_name]), bias_name) if bias_name in names else None
    cut = slice(0, model.vocab_size)  # engines leave padded rows out of the answer
    return LmHead(weight=weight[cut], bias=None if bias is None else bias[cut])


def _local_file(model: ModelFacts, name: str) -> Path:
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        return folder / name
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.name, name, revision=model.revision)
    if not isinstance(found, str):
        raise NoHeadError(f"{name} of {model.name} is not on this machine")
    return Path(found)


def _tensor_files(model: ModelFacts) -> dict[str, str]:
    """Return tensor -> file, from the index or the one file."""
    try:
        index = _read_json(_local_file(model, INDEX_FILE))
    except NoHeadError:
        single = _local_file(model, SINGLE_FILE)
        return dict.fromkeys(_names_in(single), SINGLE_FILE)
    files = index.get("weight_map")
    if not isinstance(files, dict):
        raise NoHeadError(f"{INDEX_FILE} has no weight_map")
    return {str(name): str(file) for name, file in files.items()}


def _head_name(names: dict[str, str], *, is_tied: bool) -> str:
    """Return the head's name: Kimi-K2.5 has `language_model.lm_head.weight`; a tied head is the embeddings."""
    for wanted in ("lm_head.weight", "embed_tokens.weight") if is_tied else ("lm_head.weight",):
        found = [name for name in names if name == wanted or name.endswith(f".{wanted}")]
        if len(found) == 1:
            return found[0]
        if found:
            raise NoHeadError(
                f"the model has {counted(len(found), 'tensor')} called {wanted}: {', '.join(sorted(found)[:3])}"
            )
    raise NoHeadError("the model has no tensor lm_head.weight: it is quantized, or has another name")


def _is_tied(config: dict[str, Any]) -> bool:
    """Tell whether the head is the embeddings."""
    said = (part["tie_word_embeddings"] for part in _parts(config) if "tie_word_embeddings" in part)
    return bool(next(said, True))  # transformers' default; a head of its own is looked for first


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the language model's part of the config and the whole; the first that says a thing is right."""
    parts = [*(config.get(name) for name in ("text_config", "language_config", "llm_config")), config]
    return [part for part in parts if isinstance(part, dict)]


def _names_in(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as fault:
        raise NoHeadError(f"{path.name} can't be read: {fault}") from None


def _tensor(path: Path, name: str) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as fault:
        raise NoHeadError(f"{name} can't be read from {path.name}: {fault}") from None
    return tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise NoHeadError(f"{path.name} can't be read: {fault}") from None
    return content if isinstance(content, dict) else {}
