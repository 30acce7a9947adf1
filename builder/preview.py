"""A few samples without states as one small tar, and whether the one that is there is still the dataset's.

    write_preview    evenly spaced samples: ids, mask, counts, and text by the caller's tokenizer
    remove_preview   takes it away
    preview_faults   for verify: damaged, of another packing, or not ours

The format is in schemas/preview.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.atomic import staged
from ..schemas.codec import read_record, write_record
from ..schemas.counts import counted
from ..schemas.errors import RecordError, UsageError
from ..schemas.index import IndexRow
from ..schemas.manifest import Manifest
from ..schemas.preview import PREVIEW_MEMBERS, PREVIEW_SHARD, PREVIEW_TEXT, PreviewFolder, PreviewRecord
from ..schemas.states import INPUT_IDS, LOSS_MASK
from ..schemas.statistics import shards_fingerprint
from .catalog import open_catalog
from .tar_header import BLOCK, file_bytes, pad_to, tar_header

if TYPE_CHECKING:
    from torch import Tensor

MAX_PREVIEW_SAMPLES = 1000
"""A viewer's page has a hundred; more would be no preview."""

ToText = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewSettings:
    """What a preview holds."""

    num_samples: int
    max_tokens: int = 2048
    """Longer samples are cut: a cell of the Hub's viewer holds no more."""

    to_text: ToText | None = None
    """Ids to text; None for a preview without text."""


def write_preview(dataset: Path, settings: PreviewSettings) -> PreviewRecord:
    """Write the preview of the packed dataset in the folder `dataset`; the same settings give the same bytes.

    Raises:
        UsageError: not 1 to 1,000 samples; or no packed dataset is there.
        DataError: manifest, index and shards do not belong together.
    """
    if not 1 <= settings.num_samples <= MAX_PREVIEW_SAMPLES:
        raise UsageError(
            f"a preview of {counted(settings.num_samples, 'sample')} can't be", mend=f"Give 1 to {MAX_PREVIEW_SAMPLES}"
        )
    from .sample_source import SampleSource  # brings torch, which preview_faults is asked without
    from .statistics import evenly_spaced

    catalog = open_catalog(dataset, takes_remote=True)
    folder = PreviewFolder(dataset)
    folder.record.unlink(missing_ok=True)  # while the tar changes, no record must vouch for it
    folder.shard.parent.mkdir(exist_ok=True)
    rows = evenly_spaced(catalog.rows, settings.num_samples)
    digest, size_bytes, content_bytes = hashlib.sha256(), 0, 0
    with SampleSource(catalog) as source, staged(folder.shard) as out:
        for row in rows:
            arrays = source.read(row, (INPUT_IDS, LOSS_MASK), max_tokens=settings.max_tokens)
            for name, content in _members(row, arrays, settings):
                block = tar_header(f"{row.key}.{name}", len(content)) + content.ljust(
                    pad_to(len(content), BLOCK), b"\0"
                )
                out.write(block)
                digest.update(block)
                size_bytes += len(block)
                content_bytes += len(content)
        end = bytes(file_bytes(size_bytes) - size_bytes)
        out.write(end)
        digest.update(end)
    record = PreviewRecord(
        shards_sha256=shards_fingerprint(catalog.manifest),
        num_samples=len(rows),
        max_tokens=settings.max_tokens,
        has_text=settings.to_text is not None,
        content_bytes=content_bytes,
        size_bytes=size_bytes + len(end),
        sha256=digest.hexdigest(),
    )
    write_record(folder.record, record)
    return record


def remove_preview(dataset: Path) -> None:
    """Take the preview away, if there is one."""
    folder = PreviewFolder(dataset)
    folder.record.unlink(missing_ok=True)
    folder.shard.unlink(missing_ok=True)
    if folder.shard.parent.is_dir() and not any(folder.shard.parent.iterdir()):
        folder.shard.parent.rmdir()


def preview_faults(dataset: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (file, what is wrong) for the preview of a dataset; nothing where there is none."""
    folder = PreviewFolder(dataset)
    preview = folder.shard.parent
    for path in sorted(preview.iterdir()) if preview.is_dir() else []:
        if path != folder.shard:
            yield f"{preview.name}/{path.name}", "is no part of the dataset's preview; remove it"
    if not folder.record.is_file():
        if folder.shard.is_file():
            yield PREVIEW_SHARD, f"has no record; {_AGAIN}"
        return
    try:
        record = read_record(PreviewRecord, folder.record)
    except RecordError as fault:
        yield "_index/preview.json", f"{fault}; {_AGAIN}"
        return
    if record.shards_sha256 != shards_fingerprint(manifest):
        yield PREVIEW_SHARD, f"was taken from another packing; {_AGAIN}"
    elif not folder.shard.is_file():
        yield PREVIEW_SHARD, f"is missing; {_AGAIN}"
    elif hashlib.sha256(folder.shard.read_bytes()).hexdigest() != record.sha256:
        yield PREVIEW_SHARD, f"is damaged: another SHA-256 than its record says; {_AGAIN}"


_AGAIN = "write it anew: eaglehs card --preview N"


def _members(row: IndexRow, arrays: Mapping[str, Tensor], settings: PreviewSettings) -> Iterator[tuple[str, bytes]]:
    ids = arrays[INPUT_IDS].tolist()
    contents: tuple[object, ...] = (row.id, row.num_tokens, row.num_trainable, ids, arrays[LOSS_MASK].tolist())
    for name, content in zip(PREVIEW_MEMBERS, contents, strict=True):
        text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
        yield name, text.encode("utf-8", "replace")
    if settings.to_text is not None:
        yield PREVIEW_TEXT, settings.to_text(ids).encode("utf-8", "replace")
