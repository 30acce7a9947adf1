"""Single samples of a packed dataset in a local folder, in any order: mapped, or read on the Hub if only there.

For what looks at some samples once, such as the report and the preview: a run that was larger than its disk
(`extract --push --delete-pushed`) leaves manifest and index here and its shards on the Hub alone. The rows of the local
index say which bytes they are, and their checksums that these are the same.

Shape legend: T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

from torch import Tensor

from ..schemas.index import IndexRow
from .catalog import Catalog
from .loaders import StagedLoader, Wanted
from .opened import RemoteOptions
from .pushed_shards import PushedShards
from .sample_map import SampleRows, map_sample
from .shard_source import LocalShards, ShardReader


class Rows(Protocol):
    """The rows of one sample, a stretch at a time."""

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Return the rows of an array from `start` to before `end`, all of which it has."""
        ...


class _FetchedRows:
    def __init__(self, arrays: dict[str, Tensor]) -> None:
        self._arrays = arrays

    def rows(self, name: str, start: int, end: int) -> Tensor:
        return self._arrays[name][start:end]


class SampleSource:
    """Reads samples of a dataset that was opened with `open_catalog(..., takes_remote=True)`; a context manager."""

    def __init__(self, catalog: Catalog) -> None:
        """Ask the Hub for its manifest if there are shards to be read there.

        Raises:
            StorageError: the Hub does not answer, or refuses.
        """
        self._catalog = catalog
        pushed = PushedShards(catalog.folder)
        remote = pushed.all_remote(catalog.manifest.shards)
        self._away = {note.name for note in remote}
        first_rows = {row.shard: row for row in reversed(catalog.rows)}
        self._near: ShardReader = LocalShards(root=catalog.folder.root, written_at=catalog.written_at).open(first_rows)
        self._far: ShardReader | None = None
        if remote:
            from .remote_dataset import open_remote  # clients of servers are loaded where one is read

            _, source = open_remote(str(pushed.address(remote[0].repo)), RemoteOptions())
            self._far = source.open(first_rows)

    def __enter__(self) -> SampleSource:
        """Return the source itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        """Close connections, if there are any."""
        if self._far is not None:
            self._far.close()

    def read(self, row: IndexRow, arrays: Sequence[str], *, max_tokens: int | None = None) -> dict[str, Tensor]:
        """Return the named arrays of a sample, at most `max_tokens` rows, as `sample_map.map_sample` does.

        Raises:
            DatasetMismatchError: the shard is of another packing.
            ShardCutError, FlippedBitsError: it is damaged.
            StorageError: it can't be opened, or the server does not answer.
        """
        if self._far is not None and row.shard in self._away:
            return _fetched(self._far, row, Wanted(arrays=tuple(arrays), max_tokens=max_tokens, verify=True))
        self._near.check_shard(row.shard)
        return map_sample(self._catalog.shard_path(row), row, arrays, max_tokens=max_tokens)

    def open_rows(self, row: IndexRow, arrays: Sequence[str]) -> AbstractContextManager[Rows]:
        """Return the named arrays of a sample, to be looked at a stretch of rows at a time.

        In memory that does not grow with the sample, unless its shard is on the Hub. Errors as `read`; a coded state
        that is damaged is one where it is looked at: CodedBlockError, PlanesHeadError.
        """
        if self._far is not None and row.shard in self._away:
            return nullcontext(_FetchedRows(self.read(row, arrays)))
        self._near.check_shard(row.shard)
        return SampleRows(self._catalog.shard_path(row), row, arrays)


def _fetched(reader: ShardReader, row: IndexRow, wanted: Wanted) -> dict[str, Tensor]:
    loader = StagedLoader(reader, wanted, "arena")  # without one: memory of its own
    reads = loader.plan(row)
    block = loader.take(reads, must=True)
    assert block is not None  # it must
    with ThreadPoolExecutor(max_workers=reader.threads, thread_name_prefix="eaglehs-fetch") as pool:
        for done in [pool.submit(task) for task in loader.tasks(reads, block)]:
            done.result()
    loader.finish(reads, block)
    return reads.tensors(block)
