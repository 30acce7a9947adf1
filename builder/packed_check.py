"""Checks the finished samples of a run that went straight into the shards of a dataset (`extract --pack`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..schemas.errors import DataError, StorageError
from ..schemas.index import IndexRow
from ..schemas.ledger import LedgerEntry, SampleStatus
from ..schemas.manifest import DatasetFolder
from ..schemas.run import Packing
from .assemble import SampleError
from .index_rows import index_row
from .plan import ShardPlan, plan_by
from .run_reader import Run
from .shard_head import scan_shard
from .shard_parts import part_of, read_meta, stored_hash


class NotInShardError(SampleError):
    """A sample that the ledger says is in a shard is not in it, or not as the ledger says."""


class PackedSamples:
    """Where the samples of a run lie in the dataset that it is packed into; read only."""

    def __init__(self, run: Run, packing: Packing) -> None:
        """Nothing but the plan is made yet."""
        self._run = run
        self._folder = DatasetFolder(Path(packing.dataset))
        plan = plan_by(packing, run.prompts.planned(), run.layout)
        self._shards = plan.shards
        self._layout = plan.stored_layout

    def by_shard(self) -> Iterator[tuple[Path, list[tuple[LedgerEntry, IndexRow | None]]]]:
        """Yield each file that should hold samples, with the ledger line and the place of each; None: not in it."""
        for shard in self._shards:
            entries = [self._run.entries.get(placed.key) for placed in shard.samples]
            packed = [entry for entry in entries if entry and entry.status is SampleStatus.DONE and entry.shard]
            if packed:
                path, rows = self._places(shard)
                yield path, [(entry, rows.get(entry.key)) for entry in packed]

    def _places(self, shard: ShardPlan) -> tuple[Path, dict[str, IndexRow]]:
        final = self._folder.shard(shard.name)
        part = part_of(final)
        if part.exists():
            with part.open("rb") as file:
                metas = [(placed, read_meta(file, placed)) for placed in shard.samples]
            return part, {meta.key: index_row(placed, meta, shard.name) for placed, meta in metas if meta}
        try:
            return final, {row.key: row for row in scan_shard(final, name=shard.name, layout=self._layout)}
        except (DataError, StorageError):
            return final, {}


def check_packed(path: Path, entry: LedgerEntry, row: IndexRow | None) -> None:
    """Read a sample's arrays in the shard file `path` and compare them with what the shard and the ledger say.

    Raises:
        NotInShardError: it is not there, or differs.
        FileCutError: the file ends first.
        CodedBlockError, PlanesHeadError: a coded state is damaged.
    """
    if row is None:
        raise NotInShardError(
            entry.key,
            f"is not in {path}, where the ledger says it is",
            why="The shard is gone, cut or of another dataset",
            mend="Run the same `eaglehs extract` command again: the sample is computed anew",
        )
    if (row.id, row.num_tokens, row.next_token) != (entry.id, entry.num_tokens, entry.next_token):
        raise NotInShardError(
            entry.key,
            f"id, tokens and next token are {row.id!r}, {row.num_tokens}, {row.next_token} in {path}, "
            f"{entry.id!r}, {entry.num_tokens}, {entry.next_token} in the ledger",
        )
    with path.open("rb") as file:
        for name, place in row.arrays.items():
            found = stored_hash(path, file.fileno(), row, name)
            if found != place.xxh3_128:
                raise NotInShardError(
                    entry.key, f"{name} in {path} has hash {found}, its meta.json says {place.xxh3_128}"
                )
