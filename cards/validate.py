"""Whether the Hub and `datasets` take a card, found out before anything is sent: nothing here asks a server.

The Hub judges a README.md when it is pushed, after the repository is made, and its viewer later still; `datasets`
judges it when a stranger loads the set. The rules are theirs: YAML between two lines of `---`, a license id and a size
category that are known, configs that name files of one kind that are there, features that can be parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ..schemas.codec import read_record
from ..schemas.errors import DataError, RecordError
from ..schemas.manifest import DatasetFolder, Manifest
from ..schemas.type_names import type_name
from .features import DATA_GLOB
from .licenses import license_faults

_HEAD = re.compile(r"---\r?\n(.*?)^---\r?$", re.DOTALL | re.MULTILINE)
_SIZE_CATEGORY = re.compile(
    r"n<1K|1K<n<10K|10K<n<100K|100K<n<1M|1M<n<10M|10M<n<100M|100M<n<1B|n>1T|\d+[KMBT]<n<\d+[KMBT]"
)
_CONFIG_NAME = re.compile(r"[^<>:/\\|?*\s]+")
_IMAGE = re.compile(r"""<img src="([^"]+)"|!\[[^\]]*\]\(([^)\s]+)\)""")


class CardInvalidError(DataError):
    """The Hub or `datasets` would not take the card, or take it for something else."""

    def __init__(self, card: Path, faults: tuple[str, ...]) -> None:
        """Name all faults at once."""
        self.faults = faults
        super().__init__(f"{card}: {'; '.join(faults)}", mend="Mend it with: eaglehs card --license ID")


def validate_card(dataset: Path) -> None:
    """Refuse the card of the dataset in the folder `dataset` if it is not fit to be published.

    Raises:
        CardInvalidError: names everything that is wrong.
    """
    faults = card_faults(dataset)
    if faults:
        raise CardInvalidError(DatasetFolder(dataset).card, faults)


def card_faults(dataset: Path) -> tuple[str, ...]:
    """Return all that keeps the card of a dataset from being published; empty if nothing does."""
    card = DatasetFolder(dataset).card
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        return (f"can't be read: {getattr(fault, 'strerror', None) or 'not UTF-8 text'}",)
    match = _HEAD.match(text)
    if match is None:
        return ("does not begin with YAML between two lines of ---",)
    try:
        head = yaml.load(match[1], Loader=_StrictLoader)  # noqa: S506 - a SafeLoader that refuses doubled keys
    except yaml.YAMLError as fault:
        return (f"its front matter is no YAML: {' '.join(str(fault).split())[:200]}",)
    if not isinstance(head, dict):
        return (f"its front matter is {type_name(head)}, not a list of fields",)
    return (*_head_faults(head), *_config_faults(dataset, head), *_info_faults(head), *_image_faults(dataset, text))


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that stands twice: PyYAML takes the last, the Hub refuses the card."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _head_faults(head: Mapping[str, Any]) -> Iterator[str]:
    if not head.get("license"):
        yield "names no license (eaglehs card --license ID): states carry the terms of the model and of the prompts"
    yield from license_faults(head)
    tags = head.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        yield "`tags` is not a list of words"
    sizes = head.get("size_categories", [])
    if not isinstance(sizes, list) or not all(_SIZE_CATEGORY.fullmatch(str(size)) for size in sizes):
        yield f"`size_categories` {str(sizes)[:60]} are not the Hub's"
    if not isinstance(head.get("pretty_name", ""), str):
        yield "`pretty_name` is no text"


def _config_faults(dataset: Path, head: Mapping[str, Any]) -> Iterator[str]:
    configs = head.get("configs")
    if not isinstance(configs, list) or not configs or not all(isinstance(config, dict) for config in configs):
        yield "`configs` does not say which files are the dataset; load_dataset would guess"
        return
    names = [str(config.get("config_name")) for config in configs]
    for name in sorted({name for name in names if names.count(name) > 1 or not _CONFIG_NAME.fullmatch(name)}):
        yield f"the config {name!r} stands twice or can't be a name"
    patterns = list(_patterns(configs))
    if DATA_GLOB not in patterns[:1]:
        yield f"the first config does not read {DATA_GLOB}; `datasets` takes the kind of all files from it"
    for pattern in patterns:
        is_outside = pattern.startswith("/") or ".." in pattern.split("/") or "://" in pattern
        if is_outside or not pattern.endswith(".tar"):
            yield f"the config's files {pattern!r} are not tars of this repository"
        elif not any(dataset.glob(pattern)) and not _is_listed(dataset, pattern):
            yield f"no file matches the config's {pattern!r}"


def _is_listed(dataset: Path, pattern: str) -> bool:
    """Tell whether the manifest has shards of that pattern: they may be on the Hub already and not here any more."""
    try:
        shards = read_record(Manifest, DatasetFolder(dataset).manifest).shards
    except RecordError:
        return False
    return any(PurePosixPath(shard.name).match(pattern) for shard in shards)


def _patterns(configs: list[Mapping[str, Any]]) -> Iterator[str]:
    for config in configs:
        files = config.get("data_files")
        for entry in files if isinstance(files, list) else [files]:
            path = entry.get("path") if isinstance(entry, dict) else entry
            yield from map(str, path if isinstance(path, list) else [path])


def _info_faults(head: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the typed columns; `datasets` itself parses them."""
    from datasets import Features

    info = head.get("dataset_info")
    found = info if isinstance(info, list) else [info]
    blocks = [block for block in found if isinstance(block, dict) and isinstance(block.get("features"), list)]
    if len(blocks) < max(len(found), 1):
        yield "`dataset_info` has no features; every reader would decode whole samples to guess them"
        return
    for block in blocks:
        names = [str(column.get("name")) for column in block["features"] if isinstance(column, dict)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"the column {name} stands twice"
        for name in ("__key__", "__url__"):
            if name not in names:
                yield f"the column {name} is not declared; with_format('arrow') would fail"
        try:
            Features._from_yaml_list(block["features"])
        except Exception as fault:  # noqa: BLE001 - whatever `datasets` finds is a fault of the card
            yield f"`datasets` can't read the features: {' '.join(str(fault).split())[:160]}"


def _image_faults(dataset: Path, text: str) -> Iterator[str]:
    for html, markdown in _IMAGE.findall(text):
        image = html or markdown
        if "://" not in image and not (dataset / image).is_file():
            yield f"shows the image {image}, which is not there"
