"""A real byte-level BPE tokenizer with Kimi-K2's markup, trained on the bundled conversations when it is made.

Nothing is downloaded, and the same conversations always give the same files. The markup tokens stand above the
learned ones, as they do in Kimi-K2's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

MARKUP = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<think>",
    "</think>",
    "[PAD]",
)
LEARNED_TOKENS = 1000
"""Byte alphabet and merges; the markup tokens follow from this id on."""

CONVERSATIONS = "conversations.jsonl"
CHAT_TEMPLATE = "chat_template.jinja"


def markup_id(token: str) -> int:
    """Return the id of a markup token."""
    return LEARNED_TOKENS + MARKUP.index(token)


def write_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in MARKUP])
    assert tokenizer.get_vocab_size() == LEARNED_TOKENS + len(MARKUP), "the conversations are too short to learn from"
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2) + "\n")
    (folder / CHAT_TEMPLATE).write_bytes(bundled(CHAT_TEMPLATE))


def _config() -> dict[str, object]:
    # Written by hand and not by `save_pretrained`: transformers 5 would name a class that 4.57 does not have.
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }


def _texts() -> Iterator[str]:
    for line in bundled(CONVERSATIONS).splitlines():
        yield from (message["content"] for message in json.loads(line)["messages"])


def bundled(name: str) -> bytes:
    """Return a file that comes with the demo."""
    return files(__package__ or "eaglehs.demo").joinpath(name).read_bytes()
