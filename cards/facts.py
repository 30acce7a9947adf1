"""The manifest's numbers, as the card speaks of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..schemas.counts import counted
from ..schemas.manifest import Manifest
from ..schemas.published import HIDDEN, holds_path, is_local, published_model
from ..schemas.run import ModelFacts
from ..schemas.sizes import format_size
from ..schemas.states import Codec, bytes_per_token, state_names

_DEFAULT_BUFFER = 1_000
_OF_THE_MACHINE = ("--model-path", "--revision", "--host", "--port")
"""Options of the server that are not shown: the card names the model and its revision itself."""

_SIZE_CATEGORIES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the card says that is not in the manifest word for word."""

    title: str
    model: str
    """The model's name on the Hub, or of a local folder its last part."""

    is_local: bool
    """Whether the model was a local folder, so that its name says little."""

    bytes_per_token: int
    """Ids, mask and states of one token."""

    payload_bytes: int
    """What stock readers hold of all samples: the arrays, without tar and `.npy` headers; of coded ones the shards."""

    default_buffer_bytes: int
    """What the shuffle buffer of stock `datasets`, 1,000 samples by default, would hold."""

    size_category: str
    """The Hub's name for the number of rows."""

    rows: tuple[tuple[str, str], ...]
    """The table of facts: label, value."""

    flags: str
    """The server's options, without those that say something of its machine alone; empty where there was no server."""


def card_facts(manifest: Manifest) -> CardFacts:
    """Return the card's figures; all of them follow from `manifest` alone."""
    totals = manifest.totals
    num_samples = max(totals.num_samples, 1)
    per_token = bytes_per_token(manifest.layers, manifest.model.hidden_size)
    payload_bytes = per_token * totals.num_tokens if manifest.codec is Codec.PLAIN else totals.size_bytes
    model = _short_name(manifest.model)
    return CardFacts(
        title=f"EAGLE-3 hidden states of {model}",
        model=model,
        is_local=is_local(manifest.model),
        bytes_per_token=per_token,
        payload_bytes=payload_bytes,
        default_buffer_bytes=payload_bytes * min(_DEFAULT_BUFFER, num_samples) // num_samples,
        size_category=_size_category(totals.num_samples),
        rows=_rows(manifest, per_token),
        flags=" ".join(_flags(manifest.engine.command)),
    )


def _flags(command: Sequence[str]) -> Iterator[str]:
    """Yield options and values from the first option on; of a local path no more than that there was one."""
    is_shown = False
    for word in command:
        if word.startswith("--"):
            is_shown = word.partition("=")[0] not in _OF_THE_MACHINE
        if is_shown:
            name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            yield name + equals + (HIDDEN if holds_path(value) else value)


def _rows(manifest: Manifest, per_token: int) -> tuple[tuple[str, str], ...]:
    totals, model = manifest.totals, manifest.model
    percent = 100 * totals.num_trainable / max(totals.num_tokens, 1)
    num_samples = max(totals.num_samples, 1)
    sample_bytes = totals.size_bytes / num_samples
    states = ", ".join(state_names(manifest.layers))
    return (
        ("samples", f"{totals.num_samples:,}"),
        ("tokens", f"{totals.num_tokens:,}"),
        ("tokens to train on (loss mask 1)", f"{totals.num_trainable:,} ({percent:.1f} %)"),
        ("shards", f"{len(manifest.shards):,} of at most {format_size(manifest.shard_size_bytes)}"),
        ("size", f"{format_size(totals.size_bytes)} ({counted(totals.size_bytes, 'byte')})"),
        ("mean sample", f"{counted(round(totals.num_tokens / num_samples), 'token')}, {format_size(sample_bytes)}"),
        ("bytes a token", f"{per_token:,}"),
        *_codec_rows(manifest, per_token * totals.num_tokens),
        ("states", f"{states}: {manifest.dtype}, width {model.hidden_size:,}"),
        (
            "model",
            f"{_short_name(model)}, {counted(model.num_layers, 'decoder layer')}, vocabulary {model.vocab_size:,}",
        ),
    )


def _codec_rows(manifest: Manifest, plain_bytes: int) -> tuple[tuple[str, str], ...]:
    if manifest.codec is Codec.PLAIN:
        return ()
    size_bytes = max(manifest.totals.size_bytes, 1)
    return (
        ("codec", f"{manifest.codec}, lossless: {format_size(plain_bytes)} decoded, {plain_bytes / size_bytes:.2f} x"),
    )


def _short_name(model: ModelFacts) -> str:
    """Return the name as it is published, in text that can be written."""
    return published_model(model).name.encode("utf-8", "replace").decode()


def _size_category(num_samples: int) -> str:
    return next((name for limit, name in _SIZE_CATEGORIES if num_samples < limit), "n>10M")
