"""A published dataset, checked and looked at where it is: manifest, index and listing, and all bytes only if asked.

verify_remote   the Hub's sizes and SHA-256 of every shard against the manifest; `deep` reads them too
remote_heads    manifest and index as a local folder, for `inspect`
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..schemas.codec import read_record
from ..schemas.counts import counted
from ..schemas.errors import RecordError
from ..schemas.manifest import MANIFEST_FILENAME, DatasetFolder, Manifest, ShardEntry
from ..schemas.progress import Progress
from .faults import Findings, VerifyReport
from .hub_address import HubAddress
from .hub_client import HubClient
from .index_store import read_index_head

_AT_ROOT = DatasetFolder(Path())
_INDEX = _AT_ROOT.index.as_posix()
_CARD = _AT_ROOT.card.as_posix()
_READERS = 4


def verify_remote(address: HubAddress, hub: HubClient, progress: Progress, *, deep: bool = False) -> VerifyReport:
    """Check a dataset on the Hub against its own manifest; every difference is a fault.

    Without `deep` only manifest and index are downloaded, and the Hub's word is taken for the SHA-256 of what it keeps.
    With it every shard is read and hashed, and nothing kept: the same bytes as those that passed `verify` at home.

    Raises:
        MissingRepositoryError, MissingRevisionError: there is none, or this account may not see it.
        MissingFileError: the repository holds no manifest.
        HubError: the Hub failed.
    """
    revision = hub.resolve(address.revision)
    findings = _RemoteVerifier(hub, revision, progress).verify(deep=deep)
    pinned = dataclasses.replace(address, revision=revision)
    return dataclasses.replace(findings.report("dataset"), path=str(pinned))


def remote_heads(address: HubAddress, hub: HubClient) -> tuple[Path, HubAddress]:
    """Return a local folder with manifest and index of a dataset on the Hub, and the commit that they are of.

    Raises:
        HubError: as in `verify_remote`.
    """
    revision = hub.resolve(address.revision)
    hub.fetch(_INDEX, revision)
    return hub.fetch(MANIFEST_FILENAME, revision).parent, dataclasses.replace(address, revision=revision)


class _RemoteVerifier:
    """Checks one commit."""

    def __init__(self, hub: HubClient, revision: str, progress: Progress) -> None:
        self._hub, self._revision, self._progress = hub, revision, progress
        self._findings = Findings(Path())
        self._there = hub.files(revision)

    def verify(self, *, deep: bool) -> Findings:
        path = self._hub.fetch(MANIFEST_FILENAME, self._revision)
        try:
            manifest = read_record(Manifest, path)
        except RecordError as fault:
            self._findings.add(MANIFEST_FILENAME, f"{fault}; without it nothing else can be checked")
            return self._findings
        there = [shard for shard in manifest.shards if self._check_listed(shard)]
        self._check_others({shard.name for shard in manifest.shards})
        self._check_index(manifest)
        reads = [shard for shard in there if deep or self._there[shard.name].sha256 is None]
        if reads:  # the Hub has no hash of a small file that git keeps
            self._progress.begin("verify", size_bytes=sum(shard.size_bytes for shard in reads))
            with ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="verify") as pool:
                for shard, found in zip(reads, pool.map(self._hash, reads), strict=True):
                    if found != shard.sha256:
                        said = f"manifest.json says {shard.sha256}"
                        self._findings.add(shard.name, f"its bytes have SHA-256 {found}, {said}")
        return self._findings

    def _check_listed(self, shard: ShardEntry) -> bool:
        file = self._there.get(shard.name)
        self._findings.num_samples += shard.num_samples
        self._findings.num_tokens += shard.num_tokens
        if file is None:
            self._findings.add(shard.name, "is missing on the Hub")
            return False
        self._findings.num_files += 1
        self._findings.size_bytes += file.size_bytes
        if file.size_bytes != shard.size_bytes:
            self._findings.add(
                shard.name, f"has {counted(file.size_bytes, 'byte')}, manifest.json says {shard.size_bytes:,}"
            )
        elif file.sha256 is not None and file.sha256 != shard.sha256:
            self._findings.add(shard.name, f"SHA-256 is {file.sha256} on the Hub, manifest.json says {shard.sha256}")
        return True

    def _check_others(self, listed: set[str]) -> None:
        for name in sorted(self._there):
            if name.startswith("data/") and name not in listed:
                self._findings.add(name, "is not in manifest.json; stock readers would take it for part of the dataset")
            elif name.endswith(".py") and "/" not in name:
                self._findings.add(name, "a Python file at the root: `datasets` may refuse the whole repository for it")
        if _CARD not in self._there:
            self._findings.add(_CARD, "is missing: `load_dataset` would have to guess which files are the dataset")

    def _check_index(self, manifest: Manifest) -> None:
        if _INDEX not in self._there:
            self._findings.add(_INDEX, "is missing")
            return
        path = self._hub.fetch(_INDEX, self._revision)
        with self._findings.noting(_INDEX):
            num_rows = read_index_head(path).num_rows
            if num_rows != manifest.totals.num_samples:
                self._findings.add(
                    _INDEX, f"has {counted(num_rows, 'sample')}, manifest.json says {manifest.totals.num_samples:,}"
                )

    def _hash(self, shard: ShardEntry) -> str:
        return self._hub.sha256_of(shard.name, self._revision, lambda count: self._progress.advance(size_bytes=count))
