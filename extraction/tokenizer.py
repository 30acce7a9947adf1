"""The tokenizer of a model: loaded with clear refusals, and named by hashes that are the same on every machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..schemas.errors import StorageError, UsageError, first_line

Tokenizer = Any
"""A `transformers.PreTrainedTokenizerBase`; transformers ships no types that hold."""


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """Return the tokenizer of a folder or Hub repository.

    Raises:
        UsageError: it needs code of the repository and `trust_remote_code` is not set, a package is missing, or the
            folder holds no tokenizer.
        StorageError: the Hub does not give it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    if not trust_remote_code and _needs_remote_code(name, revision):
        raise UsageError(
            f"the tokenizer of {name} is code that its repository brings",
            why="Running it means trusting that repository (Kimi's tokenizer is one of these)",
            mend="Read the code, then give --trust-remote-code",
        )
    try:
        # False, not None: with None transformers asks on the terminal and waits
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except ImportError as fault:
        raise UsageError(
            f"the tokenizer of {name} needs a package that is not installed", why=first_line(fault)
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, StrictDataclassError) as fault:
        raise _load_error(name, fault) from None


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of everything that turns text into ids; the chat template is hashed on its own.

    For a tokenizer of the `tokenizers` library: its serialization without the padding and truncation settings, which
    callers change. For one in Python: the contents of its vocabulary files and its added tokens. Paths are left out.
    """
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
        digest.update(_canonical(state))
    else:
        for name in sorted(getattr(tokenizer, "vocab_files_names", {})):
            path = getattr(tokenizer, name, None)
            if path and Path(path).is_file():
                digest.update(name.encode() + b"\0" + hashlib.sha256(Path(path).read_bytes()).digest())
        digest.update(_canonical(tokenizer.get_vocab()))
    specials = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    digest.update(_canonical(specials))
    return digest.hexdigest()


def template_hash(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the chat template's text, or of all of them where it has several by name."""
    template = tokenizer.chat_template
    return hashlib.sha256(template.encode() if isinstance(template, str) else _canonical(template)).hexdigest()


def _needs_remote_code(name: str, revision: str | None) -> bool:
    """Tell whether tokenizer_config.json names a class of the repository; transformers may try others in silence."""
    config = _tokenizer_config(name, revision)
    entry = config.get("auto_map", {})
    classes = entry.get("AutoTokenizer") if isinstance(entry, dict) else entry
    return bool(classes)


def _tokenizer_config(name: str, revision: str | None) -> dict[str, Any]:
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        config = get_tokenizer_config(name, revision=revision)
    except (OSError, ValueError) as fault:
        raise _load_error(name, fault) from None
    return config if isinstance(config, dict) else {}


def _load_error(name: str, fault: Exception) -> UsageError | StorageError:
    if "trust_remote_code" in str(fault):
        return UsageError(
            f"{name} brings code of its own", why=first_line(fault), mend="Read it, then give --trust-remote-code"
        )
    if Path(name).expanduser().is_dir():
        return UsageError(
            f"no tokenizer can be read from the folder {name}",
            why=first_line(fault),
            mend="Put the model's tokenizer files there, or give rows with input_ids",
        )
    return StorageError(
        f"the tokenizer of {name} can't be loaded",
        why=first_line(fault),
        mend="Check the name, the network and, for a gated model, that you are logged in: hf auth login",
    )


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str).encode()
