"""`extract --pack`: the keeper that writes checked samples into the shards of a dataset instead of keeping dumps.

The client of extraction/ and the shards of builder/ meet here. Order of a sample: its bytes in the shard's part are
synced, its ledger line is synced, its dumps are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .schemas.errors import DataError, UsageError
from .schemas.ledger import LedgerEntry
from .schemas.progress import Progress
from .schemas.run import Packing, RunRecord
from .schemas.sharding import Sharding
from .schemas.states import Codec

if TYPE_CHECKING:
    from .builder.one_step import OneStep
    from .builder.pack import PackSummary
    from .extraction.engines.protocol import Answer
    from .extraction.run_store import RunStore
    from .schemas.manifest import DatasetFolder, ShardEntry
    from .schemas.prompt import Prompt
    from .schemas.sample import CheckedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions(Sharding):
    """Where and how to pack while extracting."""

    dataset: Path
    is_drained: bool = False
    """Finished shards are sent away and deleted, so that room for a few is enough."""

    @property
    def packing(self) -> Packing:
        """What run.json says of it."""
        return Packing(
            dataset=str(self.dataset.absolute()),
            shard_size_bytes=self.shard_size_bytes,
            shuffle_seed=self.shuffle_seed,
            shard_multiple=self.shard_multiple,
            codec=self.codec,
        )


def check_same_packing(found: RunRecord, options: PackOptions | None, where: Path) -> None:
    """Refuse to go on with a run that is packed otherwise: its samples lie where the first start planned them.

    Raises:
        UsageError: names what differs.
    """
    wanted = options.packing if options else None
    if found.packing == wanted:
        return
    if found.packing is None:
        raise UsageError(
            f"{where} was begun without --pack: its finished samples are dumps",
            mend=f"Go on without --pack and then run `eaglehs pack {where}`, or give another --out for a new run",
        )
    old = found.packing
    shuffle = "" if old.shuffle_seed is None else f" --shuffle {old.shuffle_seed}"
    multiple = "" if old.shard_multiple == 1 else f" --shard-multiple {old.shard_multiple}"
    codec = "" if old.codec is Codec.PLAIN else f" --codec {old.codec}"
    given = f"--shard-size {old.shard_size_bytes}{shuffle}{multiple}{codec}"
    raise UsageError(
        f"{where} is packed into {old.dataset} with {given}",
        why="Its samples lie at the places that these options gave them",
        mend=f"Give --pack {old.dataset} {given}, or another --out for a new run",
    )


class PackingKeeper:
    """A Keeper (extraction/keeper.py): a sample's bytes go to its shard."""

    def __init__(self, store: RunStore, packer: OneStep) -> None:
        """Use `open_packing`."""
        self._store = store
        self._packer = packer
        self.sealed: Callable[[ShardEntry], None] | None = None
        """Hears of each shard that is finished, whole; called from any thread."""

    @property
    def folder(self) -> DatasetFolder:
        """The dataset."""
        return self._packer.folder

    @property
    def whole(self) -> Sequence[ShardEntry]:
        """Shards that were finished, with all their samples, before this start."""
        return self._packer.whole

    @property
    def shard_names(self) -> Collection[str]:
        """The names that the dataset's shards may have."""
        return self._packer.shard_names

    @property
    def record(self) -> RunRecord:
        """run.json as it now is."""
        return self._store.record

    def attempt_number(self, num_tries: int) -> int:
        """Return the attempt number of the try after `num_tries` tries of this start."""
        return self._store.attempt_number(num_tries)

    def fail(self, prompt: Prompt, reason: str, attempt: int) -> None:
        """Record that a sample failed for good in this start; its place is taken out at the end."""
        self._store.fail(prompt, reason, attempt)

    def finish(self, prompt: Prompt, checked: CheckedSample, answer: Answer, attempt: int) -> LedgerEntry:
        """Write a checked sample to its place for good; its dumps leave the spool.

        Raises:
            DataError: a dump changed after it was checked; the dumps are removed.
            StorageError: the disk is full or failed; the sample is not in the ledger.
        """
        from .extraction.run_store import done_entry

        try:
            shard = self._packer.write(prompt, checked, answer.dumps, answer.next_token)
        except DataError:
            answer.remove_dumps()
            raise
        entry = replace(done_entry(prompt, checked, answer, attempt), shard=shard)
        self._store.append(entry)
        answer.remove_dumps()
        with self._forgetting():
            shard_entry = self._packer.kept(prompt.key)
        sealed = self.sealed  # once: a push that is given up takes it away, from another thread
        if shard_entry is not None and sealed is not None:
            sealed(shard_entry)
        return entry

    def seal_filled(self) -> None:
        """Seal what an earlier start filled and had no time to seal, so that it is sent and freed like any other.

        Raises:
            DataError: stored bytes are not right any more; their sample is computed again.
            StorageError: the disk failed.
        """
        with self._forgetting():
            self._packer.seal_filled()

    def begin(self) -> None:
        """Make the dataset folder ready for more samples; it is no dataset until `pack` ends.

        Raises:
            StorageError: the folder can't be written.
        """
        self._packer.begin()

    def pack(self) -> PackSummary:
        """Finish the dataset with all samples that the run has.

        Raises:
            NothingToPackError: it has none.
            StorageError: the disk is full or failed; the same command goes on.
        """
        with self._forgetting():
            return self._packer.finish(self._store.record)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Give a sample whose stored bytes are not right any more a ledger line that says so, and raise."""
        from .builder.read_back import ShardReadBackError
        from .extraction.run_store import lost_entry

        try:
            yield
        except ShardReadBackError as fault:
            self._store.append(lost_entry(self._store.ledger.entries[fault.key], fault.what))
            raise


@contextmanager
def open_packing(
    store: RunStore, options: PackOptions, progress: Progress
) -> Iterator[tuple[PackingKeeper, frozenset[str]]]:
    """Lock and claim the dataset's folder; yield the keeper and the keys of the samples that its shards hold.

    Raises:
        UsageError: the folder holds what is not this run's, or another process packs into it.
        StorageError: it can't be written.
    """
    from .builder.one_step import OneStep
    from .builder.pack_state import locked
    from .builder.run_reader import open_run
    from .builder.worker_count import worker_count

    with locked(options.dataset), open_run(store.folder.root) as run:
        # One ledger: what the store appends, the packer reads.
        shared = replace(run, entries=store.ledger.entries)
        packer = OneStep(shared, options.dataset, options, progress, workers=worker_count(None))
        keeper, packed = PackingKeeper(store, packer), packer.open()
        keeper.seal_filled()
        yield keeper, packed
