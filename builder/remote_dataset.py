"""Datasets on the Hub, on HTTP servers and in stores that fsspec knows: where they are, and their manifest and index.

    org/name, hf://datasets/org/name[@revision][/folder]     ranged GETs of the Hub's resolve addresses
    http://, https://                                        ranged GETs
    s3://, gs://, memory://, ...                             fsspec

The manifest and the index are read once, when the dataset is opened; after that only ranges of shards.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import xxhash

from ..schemas.codec import read_record
from ..schemas.errors import RecordError, UsageError
from ..schemas.index import IndexRow
from ..schemas.manifest import MANIFEST_FILENAME, DatasetFolder, Manifest
from ..schemas.progress import Silent
from .catalog import Catalog, check_rows
from .http_connection import shown
from .http_ranges import RemoteMissingError, RemoteRefusedError
from .hub_address import REPOSITORY
from .index_store import read_index
from .opened import RemoteOptions
from .remote_shards import FsspecPlace, HttpPlace, Place, RemoteShards
from .shard_cache import CachedShards
from .shard_source import ShardSource

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_HUB = re.compile(r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?(/(?P<folder>.+?))?/?")
_INDEX = "_index/samples.parquet"
_LOOK_UPS = 3
"""Tries to find out which commit is meant; each has the Hub client's own behind it."""


def open_remote(dataset: str, options: RemoteOptions) -> tuple[Catalog, ShardSource]:
    """Open a dataset by its URL or its name on the Hub.

    Raises:
        UsageError: it is none of ours.
        MissingRepositoryError, MissingRevisionError: the Hub has none, or shows none to this account.
        DataError: manifest and index are damaged or do not belong together.
        StorageError: the server or the Hub does not answer, or refuses.
    """
    place = _locate(dataset, options.revision)
    catalog = _catalog(place)
    sizes = {entry.name: entry.size_bytes for entry in catalog.manifest.shards}
    shards = RemoteShards(place=place, size_bytes=sizes, connections=options.connections)
    if options.cache_dir is None:
        return catalog, shards
    return catalog, CachedShards(
        shards=shards,
        folder=options.cache_dir / catalog.fingerprint,
        sha256={entry.name: entry.sha256 for entry in catalog.manifest.shards},
    )


def _locate(dataset: str, revision: str | None) -> Place:
    match = _HUB.fullmatch(dataset)
    if match is not None or REPOSITORY.fullmatch(dataset):
        repo, named, folder = (dataset, None, None) if match is None else match.group("repo", "revision", "folder")
        if named and revision and named != revision:
            raise UsageError(f"{dataset} names revision {named}, and revision={revision!r} another one")
        return _on_hub(str(repo), revision or named, folder or "")
    if revision is not None:
        raise UsageError(f"revision {revision!r} of {dataset}, which is not on the Hub")
    if dataset.startswith("hf://"):
        mend = "Write hf://datasets/org/name or hf://datasets/org/name@revision"
        raise UsageError(f"{dataset} is no dataset on the Hub", mend=mend)
    if dataset.startswith(("http://", "https://")):
        parts = urlsplit(dataset)
        base = urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/", query="", fragment=""))
        return HttpPlace(base_url=base, query=parts.query, headers={}, name=shown(dataset))
    return FsspecPlace(url=dataset.rstrip("/"))


def _on_hub(repo: str, revision: str | None, folder: str) -> Place:
    """Look the revision up once: all ranks and all epochs read one commit, whatever is pushed meanwhile."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, but not listed

    from .hub_errors import HubPlace
    from .hub_retry import HubRetryPolicy, Retrier

    api = HfApi()
    place = HubPlace(repo=repo, endpoint=api.endpoint)
    retrier = Retrier(place=place, policy=HubRetryPolicy(attempts=_LOOK_UPS), progress=Silent())
    doing = f"opening {repo}" + (f" at {revision}" if revision else "") + " on the Hub"
    commit = str(retrier.call(doing, lambda: api.dataset_info(repo, revision=revision).sha))
    if revision is not None:
        _warn_of_change(api, repo, commit)
    name = f"hf://datasets/{repo}@{commit}" + (f"/{folder}" if folder else "")
    url = hf_hub_url(repo, f"{folder}/x" if folder else "x", repo_type="dataset", revision=commit)
    return HttpPlace(base_url=url.removesuffix("x"), query="", headers=build_hf_headers(), name=name)


def _warn_of_change(api: HfApi, repo: str, commit: str) -> None:
    """Warn if the manifest on `main` is another than that of the commit which was asked for; needs no answer."""
    from .hub_errors import FAULTS

    try:
        newest = str(api.dataset_info(repo).sha)
        is_changed = newest != commit and _manifest_hash(api, repo, newest) != _manifest_hash(api, repo, commit)
    except FAULTS:  # the stream itself does not need to know
        return
    if is_changed:
        warnings.warn(
            f"{repo} was published anew since {commit[:12]}: main is {newest[:12]} and has another manifest; "
            f"{commit[:12]} is read, as asked for",
            stacklevel=7,
        )


def _manifest_hash(api: HfApi, repo: str, commit: str) -> list[str]:
    """Return git's hash of the manifest at a commit; nothing where there is none."""
    found = api.get_paths_info(repo, [MANIFEST_FILENAME], revision=commit, repo_type="dataset")
    return [str(getattr(file, "blob_id", "")) for file in found]


def _catalog(place: Place) -> Catalog:
    """Fetch manifest and index; they are read as those of a local dataset are."""
    with tempfile.TemporaryDirectory(prefix="eaglehs-") as name:
        folder = DatasetFolder(Path(name))
        content = _manifest_of(place)
        folder.manifest.write_bytes(content)
        folder.index.parent.mkdir()
        try:
            manifest = read_record(Manifest, folder.manifest)
            folder.index.write_bytes(place.fetch(_INDEX))
            rows: tuple[IndexRow, ...] = tuple(read_index(folder.index))
        except RemoteMissingError as fault:
            raise RecordError("is missing", where=f"{place.name}/{_INDEX}", why=str(fault)) from None
        except RecordError as fault:
            raise _of_place(fault, name, place.name) from None
    check_rows(rows, manifest, place.name)
    fingerprint = xxhash.xxh3_128_hexdigest(content)
    return Catalog(folder=folder, manifest=manifest, rows=rows, fingerprint=fingerprint)


def _manifest_of(place: Place) -> bytes:
    try:
        return place.fetch(MANIFEST_FILENAME)
    except RemoteRefusedError:
        raise
    except RemoteMissingError as fault:
        raise UsageError(
            f"{place.name} holds no {MANIFEST_FILENAME}, so it is no packed dataset, or not a whole one",
            why=fault.what,
            mend=fault.mend,
        ) from None


def _of_place(fault: RecordError, folder: str, place: str) -> RecordError:
    """Return the fault with the dataset's name in place of that of the folder to which it was copied."""
    where = fault.where.replace(folder, place)
    what = fault.what.replace(folder, place).removeprefix(f"{where}: ")
    return RecordError(what, where=where, why=fault.why, mend=fault.mend)
