"""The facts of the target model that everything else rests on, read from its config.json alone."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from ..schemas.errors import DataError, StorageError, UsageError, first_line
from ..schemas.json_text import parse_json
from ..schemas.run import LOCAL_REVISION, ModelFacts

CONFIG_FILENAME = "config.json"

# Where a model of several parts keeps its language model: Kimi-K2.5, Qwen-VL and Llama 4 use the first name,
# DeepSeek-VL and older InternVL the next two, Qwen-Omni the last, around another `text_config`.
_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
_NAMES = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position": ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"),
}
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelConfigError(DataError):
    """A model's config.json can't be read, or lacks a field that a run needs."""


def read_model_facts(name: str, *, revision: str | None = None) -> ModelFacts:
    """Return the facts of the model `name`, a local folder or a Hub repository at `revision`.

    Of a Hub repository one file is fetched, or taken from the cache; no code of the repository runs.

    Raises:
        UsageError: there is no such folder, or it holds no config.json.
        StorageError: the Hub has no such repository or revision, refuses it, or can't be reached.
        ModelConfigError: config.json is not JSON, or lacks a field.
    """
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        config_path = _local_config(folder)
        found_revision = _local_revision(folder)
    else:
        config_path = _fetch_config(name, revision)
        found_revision = _commit_of(config_path) or revision or "main"
    return facts_from_config(_read_config(config_path), name=name, revision=found_revision)


def facts_from_config(config: dict[str, Any], *, name: str, revision: str) -> ModelFacts:
    """Return the facts that a parsed config.json states; the language model's part of it wins over the whole.

    Raises:
        ModelConfigError: a field is missing or no whole number above zero.
    """
    parts = [config]
    while nested := next((parts[0][key] for key in _NESTED if isinstance(parts[0].get(key), dict)), None):
        parts.insert(0, nested)
    numbers = {fact: _number(parts, fact, name) for fact in _NAMES}
    return ModelFacts(name=name, revision=revision, architecture=_architecture(parts, name), **numbers)


def _number(parts: list[dict[str, Any]], fact: str, name: str) -> int:
    for part in parts:
        for field in _NAMES[fact]:
            value = part.get(field)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelConfigError(f"{name}: config.json has {field} = {value!r}, no whole number above zero")
            return value
    fields = " or ".join(_NAMES[fact])
    raise ModelConfigError(
        f"{name}: config.json has no {fields}, at its top or under {', '.join(_NESTED)}",
        mend="Use the config.json of the model itself, not of an adapter or a quantization recipe",
    )


def _architecture(parts: list[dict[str, Any]], name: str) -> str:
    """Return the class that an engine loads: the outermost part's, since it is the one that the engine starts from."""
    for part in reversed(parts):
        names = part.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
    for part in reversed(parts):
        if isinstance(part.get("model_type"), str):
            return str(part["model_type"])
    raise ModelConfigError(f"{name}: config.json has neither architectures nor model_type")


def _local_config(folder: Path) -> Path:
    path = folder / CONFIG_FILENAME
    if not path.is_file():
        found = ", ".join(sorted(item.name for item in folder.iterdir())[:5]) or "nothing"
        raise UsageError(
            f"{folder} is a folder without config.json (it holds {found})",
            mend="Give the model's own folder to --model, or its name on the Hub",
        )
    return path


def _local_revision(folder: Path) -> str:
    """Return `local-<hash>` of config.json and of the weights' names and sizes; a terabyte of weights is not read."""
    digest = hashlib.sha256((folder / CONFIG_FILENAME).read_bytes())
    for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
        digest.update(f"\n{path.name} {path.stat().st_size}".encode())
    return f"{LOCAL_REVISION}{digest.hexdigest()[:16]}"


def _fetch_config(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    if _HUB_NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is neither a folder nor the name of a model on the Hub (org/name)")
    try:
        return Path(hf_hub_download(name, CONFIG_FILENAME, revision=revision))
    except LocalEntryNotFoundError as fault:
        raise StorageError(
            f"{name} is no local folder, not in the Hub cache, and the Hub can't be reached",
            why=first_line(fault),
            mend="Check the network and HF_HUB_OFFLINE, or give a local folder",
        ) from None
    except EntryNotFoundError:
        raise ModelConfigError(f"{name} on the Hub has no config.json", mend="Give the repository of a model") from None
    except HfHubHTTPError as fault:
        at = f" at revision {revision}" if revision else ""
        raise StorageError(
            f"the Hub did not give {name}{at}",
            why=first_line(fault),
            mend="Check the name, and for a private or gated model that you are logged in: hf auth login",
        ) from None
    except (OSError, ValueError) as fault:
        raise StorageError(f"config.json of {name} can't be fetched", why=first_line(fault)) from None


def is_commit(revision: str) -> bool:
    """Tell whether a revision is a commit of the Hub, and not a branch or tag, nor a local folder's hash."""
    return _COMMIT.fullmatch(revision) is not None


def _commit_of(cached: Path) -> str | None:
    """Return the commit that a file of the Hub cache belongs to: its folder under `snapshots`."""
    return cached.parent.name if is_commit(cached.parent.name) else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise ModelConfigError(f"{path} can't be read as JSON ({fault})") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} holds a {type(config).__name__}, no JSON object")
    return config
