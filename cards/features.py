"""The card's front matter: which files are the dataset, and the type of every column.

`datasets` reads it before any shard. Declared features spare it from decoding the first samples to guess types (whole
samples, about 100 MB each), and keep arrays as arrays: a guessed type comes back as a list of rows. Four things that
look optional are not:

- `__key__` and `__url__` stand in the list: without them `with_format("arrow")` raises CastError.
- ids and mask are `[T, 1]` arrays, not lists: a list becomes one tensor a token in `DataLoader` workers.
- all configs are of tar files: `datasets` picks one reader for the whole repository.
- the viewer is off: rows of tens of megabytes break it. With a preview (schemas/preview.py), a second config of small
  rows, it is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ..schemas.manifest import Manifest
from ..schemas.preview import PREVIEW_SHARD, PREVIEW_TEXT, PreviewRecord
from ..schemas.sample import META_MEMBER
from ..schemas.states import ArraySpec, Codec, array_specs
from .facts import CardFacts
from .licenses import TERM_KEYS

DATA_GLOB = "data/train-*.tar"
SPLIT = "train"
PREVIEW_CONFIG = "preview"
_NUMPY_NAMES = {"<i4": "int32", "|u1": "uint8", "<u2": "uint16"}
_TAGS = ("eagle-3", "hidden-states", "speculative-decoding", "webdataset")

Yaml = dict[str, Any]


def front_matter(
    manifest: Manifest, facts: CardFacts, kept: Mapping[str, str], preview: PreviewRecord | None = None
) -> str:
    """Return the YAML text of the card's head, without the `---` lines; `kept` goes first (the publisher's terms)."""
    configs = [{"config_name": "default", "data_files": [{"split": SPLIT, "path": DATA_GLOB}]}]
    info = _dataset_info(manifest, facts)
    head: Yaml = {
        **kept,
        "pretty_name": facts.title,
        "tags": list(_TAGS),
        "size_categories": [facts.size_category],
    }
    if preview is None:
        head |= {"viewer": False, "configs": configs, "dataset_info": info}
    else:
        configs.append({"config_name": PREVIEW_CONFIG, "data_files": [{"split": SPLIT, "path": PREVIEW_SHARD}]})
        named = [{"config_name": "default", **info}, {"config_name": PREVIEW_CONFIG, **_preview_info(preview)}]
        head |= {"configs": configs, "dataset_info": named}
    text: str = yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=120)
    return text


def columns(manifest: Manifest) -> list[Yaml]:
    """Return the type of every column in the form of `dataset_info.features`."""
    specs = array_specs(manifest.layers, manifest.model.hidden_size, manifest.codec)
    strings = ({"name": name, "dtype": "string"} for name in ("__key__", "__url__"))
    return [_meta_column(specs), *(_array_column(spec) for spec in specs), *strings]


def _array_column(spec: ArraySpec) -> Yaml:
    if spec.codec is not Codec.PLAIN:
        return {"name": spec.member, "dtype": "binary"}
    kind = {"shape": [None, spec.width], "dtype": _NUMPY_NAMES[spec.dtype]}
    return {"name": spec.member, "dtype": {"array2_d": kind}}


def _meta_column(specs: tuple[ArraySpec, ...]) -> Yaml:
    """Return the type of `meta.json`; its fields are those of schemas/sample.py, sorted as they stand in the file."""
    fields: list[Yaml] = [
        {"name": "id", "dtype": "string"},
        {"name": "key", "dtype": "string"},
        {"name": "kind", "dtype": "string"},
        {"name": "next_token", "dtype": "int64"},
        {"name": "num_tokens", "dtype": "int64"},
        {"name": "num_trainable", "dtype": "int64"},
        {"name": "source", "dtype": "string"},
        {"name": "version", "dtype": "int64"},
        {"name": "xxh3_128", "struct": [{"name": spec.name, "dtype": "string"} for spec in specs]},
    ]
    return {"name": META_MEMBER, "struct": fields}


def _dataset_info(manifest: Manifest, facts: CardFacts) -> Yaml:
    totals = manifest.totals
    split = {"name": SPLIT, "num_bytes": facts.payload_bytes, "num_examples": totals.num_samples}
    # With both sizes known, `datasets` refuses to convert a set that the disk has no room for before it starts.
    return {
        "features": columns(manifest),
        "splits": [split],
        "download_size": totals.size_bytes,
        "dataset_size": facts.payload_bytes,
    }


def _preview_info(preview: PreviewRecord) -> Yaml:
    """Return the types of the preview's columns; lists, not arrays, are what the viewer shows in a cell."""
    features: list[Yaml] = [
        {"name": "id.txt", "dtype": "string"},
        {"name": "num_tokens.json", "dtype": "int64"},
        {"name": "num_trainable.json", "dtype": "int64"},
        {"name": "input_ids.json", "list": "int32"},
        {"name": "loss_mask.json", "list": "uint8"},
    ]
    features += [{"name": PREVIEW_TEXT, "dtype": "string"}] if preview.has_text else []
    features += [{"name": name, "dtype": "string"} for name in ("__key__", "__url__")]
    return {
        "features": features,
        "splits": [{"name": SPLIT, "num_bytes": preview.content_bytes, "num_examples": preview.num_samples}],
        "download_size": preview.size_bytes,
        "dataset_size": preview.content_bytes,
    }


def read_kept(card: str) -> dict[str, str]:
    """Return the terms in an existing card's head: the publisher's to give, so a new card keeps them."""
    parts = card.split("---\n", 2)
    if not card.startswith("---\n") or len(parts) < 3:
        return {}
    try:
        head = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    found = head if isinstance(head, dict) else {}
    return {name: found[name] for name in TERM_KEYS if isinstance(found.get(name), str)}
