"""Small real tokenizers with chat templates of the kinds that matter: Kimi, ChatML, Llama, thinking, unstable.

Each is a byte-level BPE trained here on a few lines, so that words merge to tokens as in a real vocabulary.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIALS = (
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>",
    "<|im_start|>", "<|bos|>", "<|header|>", "<|eot|>",
)  # fmt: skip
THINK_TOKENS = ("<think>", "</think>")

_LINES = [
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system tool You are a helpful assistant.",
    "Hello there! How are you today? I am fine, thank you.",
    "def add(a, b):\n    return a + b\n\nfirst, second and third answer",
    "std::vector and std::string, a::b::c",
]

_KIMI_TURN = (
    "{%- if m.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>"
    "GEN{{ m.content }}<|im_end|>ENDGEN"
    "{%- elif m.role == 'system' -%}<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>"
    "{%- else -%}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{%- endif -%}"
)


def _marked(template: str) -> str:
    return template.replace("ENDGEN", "{% endgeneration %}").replace("GEN", "{% generation %}")


def _unmarked(template: str) -> str:
    return template.replace("ENDGEN", "").replace("GEN", "")


_KIMI = (
    "{%- for m in messages -%}"
    "{%- if loop.first and m.role != 'system' -%}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{%- endif -%}"
    f"{_KIMI_TURN}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
KIMI = _unmarked(_KIMI)
KIMI_MARKED = _marked(_KIMI)

# Kimi-K2.5's ways: thoughts of all turns up to the last answer are blanked, those of tool calls behind it are kept
KIMI_THINK = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' and not m.tool_calls -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|><think>"
    "{%- if loop.index0 > ns.last -%}{{ m.reasoning_content or '' }}{%- endif -%}</think>{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}[call {{ call.function.name }}]{%- endfor -%}<|im_end|>"
    "{%- else -%}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>"
    "{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}{%- endif -%}"
)

_CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' -%}GEN{{ m.content }}<|im_end|>ENDGEN{{ '\n' }}"
    "{%- else -%}{{ m.content }}<|im_end|>{{ '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
).replace("{{ m.role }}\n", "{{ m.role + '\n' }}")
CHATML = _unmarked(_CHATML)
CHATML_MARKED = _marked(_CHATML)

# Qwen3's ways: the last turn shows its thought, or an empty one; once a user follows it shows none
CHATML_THINK = (
    "{%- set ns = namespace(last_user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last_user -%}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
)

LLAMA = (
    "{{- '<|bos|>' -}}{%- for m in messages -%}"
    "{{- '<|header|>' + m.role + '<|header|>\n\n' + m.content | trim + '<|eot|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|header|>assistant<|header|>\n\n' -}}{%- endif -%}"
)

# The first line counts the messages: no prefix is rendered as in the whole
UNSTABLE = "{{ messages | length }} messages\n" + KIMI
UNSTABLE_MARKED = "{{ messages | length }} messages\n" + KIMI_MARKED

# Refuses what many templates refuse
STRICT = (
    "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate') }}{%- endif -%}{%- endfor -%}"
) + KIMI


@cache
def _backend() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_LINES * 4, trainer)
    backend.add_tokens(list(THINK_TOKENS))
    return str(backend.to_str())


@cache
def fast_tokenizer(template: str | None = KIMI, *, bos: bool = False) -> Any:
    """Return a tokenizer of the `tokenizers` library with a chat template; it gives offsets."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token="<|im_end|>",
        bos_token="<|bos|>" if bos else None,
        additional_special_tokens=[text for text in SPECIALS if text != "<|im_end|>"],
        chat_template=template,
    )


class BytesTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, as Kimi's is: one token a byte, or a pair of equal bytes; it gives no offsets."""

    vocab_files_names = {"vocab_file": "bytes.txt"}  # noqa: RUF012 - the name and form that transformers reads

    def __init__(self, vocab_file: str | None = None, **options: Any) -> None:
        """`vocab_file` is only hashed."""
        self.vocab_file = vocab_file
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return 512

    def get_vocab(self) -> dict[str, int]:
        base = {_byte_token(number): number for number in range(512)}
        return base | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        tokens, data = [], text.encode()
        while data:
            is_pair = len(data) > 1 and data[0] == data[1]
            tokens.append(_byte_token(data[0] + 256 * is_pair))
            data = data[1 + is_pair :]
        return tokens

    def _convert_token_to_id(self, token: str) -> int:
        return int(token[1:])

    def _convert_id_to_token(self, index: int) -> str:
        return _byte_token(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(_token_bytes(token) for token in tokens).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()


def _token_bytes(token: str) -> bytes:
    if token.startswith("<"):
        return token.encode()
    is_pair, value = divmod(int(token[1:]), 256)
    return bytes([value]) * (1 + is_pair)


def _byte_token(number: int) -> str:
    return f"b{number:03d}"


@cache
def slow_tokenizer(template: str | None = KIMI) -> Any:
    """Return a tokenizer written in Python, without offsets."""
    return BytesTokenizer(
        eos_token="<|im_end|>",
        additional_special_tokens=[*(text for text in SPECIALS if text != "<|im_end|>"), *THINK_TOKENS],
        chat_template=template,
    )


def save_model_folder(folder: Path, tokenizer: Any | None = None, **config: Any) -> Path:
    """Write a config.json, and the tokenizer's files if one is given; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 600,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(fields | config))
    return folder


def chat(*turns: str, **last: Any) -> list[dict[str, Any]]:
    """Return messages from `role: text` lines; `last` adds fields to the last one."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        role, _, content = turn.partition(": ")
        messages.append({"role": role, "content": content})
    messages[-1].update(last)
    return messages
