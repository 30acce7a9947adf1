"""A dataset, opened where it is: a local folder, the Hub, an HTTP server or any store that fsspec knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..schemas.errors import UsageError
from .catalog import Catalog, open_catalog
from .hub_address import REPOSITORY
from .shard_source import LocalShards, ShardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDataset:
    """What is in a dataset, and where its shards are."""

    catalog: Catalog
    source: ShardSource
    is_remote: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """How a remote dataset is read; of no effect on a local one."""

    revision: str | None = None
    """Branch, tag or commit of a dataset on the Hub."""

    connections: int = 16
    """Ranges that are asked for at a time."""

    cache_dir: Path | None = None
    """Where whole shards are kept, once and for all; None keeps nothing."""


def open_dataset(dataset: str | Path, options: RemoteOptions) -> OpenedDataset:
    """Open a dataset for reading.

    Raises:
        UsageError: it is nowhere, or no packed dataset.
        DataError: manifest, index and shards are damaged or do not belong together.
        StorageError: the server or the Hub does not answer, or refuses.
    """
    text = str(dataset)
    if Path(dataset).exists() or not ("://" in text or REPOSITORY.fullmatch(text)):
        if options.revision is not None:
            raise UsageError(f"revision {options.revision!r} of {text}, which is a local folder")
        catalog = open_catalog(dataset)
        local = LocalShards(root=catalog.folder.root, written_at=catalog.written_at)
        return OpenedDataset(catalog=catalog, source=local, is_remote=False)
    from .remote_dataset import open_remote  # clients of servers are loaded where one is read

    catalog, source = open_remote(text, options)
    return OpenedDataset(catalog=catalog, source=source, is_remote=True)
