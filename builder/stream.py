"""A packed dataset as a torch `IterableDataset`: memory-mapped, shuffled, split, resumable, no byte read in vain.

    for sample in eaglehs.stream("dataset", states=["layer_3", "final"], shuffle_seed=0): ...

The index says where every array lies, so any sample can be had in any order at the same cost: a shuffle needs no
buffer, a rank reads only its own samples, resuming reads nothing twice. One process without workers is the fastest
way: samples are views of the mapped file. DataLoader workers work, and copy each sample through shared memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from ..schemas import codec
from ..schemas.errors import UsageError
from ..schemas.index import IndexRow
from ..schemas.manifest import Manifest
from .catalog import Catalog, check_shard_is_its_own, open_catalog
from .decode import DecodedSample
from .sample_map import choose_arrays, load_sample
from .sample_order import Order, Remainder, epoch_order, rank_part, worker_part
from .stream_state import Pass, SharedCursor, StreamState, check_same_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream gives out, checked."""

    arrays: tuple[str, ...]
    max_tokens: int | None
    shuffle_seed: int | None
    rank: int
    world_size: int
    remainder: Remainder


def stream(  # noqa: PLR0913 - the one call of a training script; a record would only be in its way
    dataset: str | Path,
    *,
    states: Sequence[str] | None = None,
    max_tokens: int | None = None,
    shuffle_seed: int | None = None,
    epoch: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    remainder: Remainder = "keep",
) -> HiddenStateStream:
    """Open a packed dataset in a local folder for reading.

    Args:
        dataset: the folder that `eaglehs pack` wrote.
        states: which states to read, such as `["layer_3", "final"]`; None for all. Ids and mask always come. Bytes of
            other states are not touched.
        max_tokens: longer samples lose their tail, unread, in all arrays alike.
        shuffle_seed: None keeps the order of the shards; a number shuffles all samples, anew each epoch, by seed and
            epoch alone.
        epoch: the epoch of the first pass; see `HiddenStateStream.set_epoch`.
        rank: which part of the samples this process reads, of `world_size`. None takes both from torch.distributed if
            it is initialised, else from the variables RANK and WORLD_SIZE, else 0 of 1. Processes that share one
            model (tensor parallel) must give the rank of their group, to see the same samples.
        world_size: see `rank`.
        remainder: `keep` gives each sample once, so that some ranks may see one more; `drop` and `repeat` let all
            ranks end together (see builder/sample_order.py).

    Raises:
        UsageError: an option can't be; or no packed dataset is there.
        DataError: manifest, index and shards are damaged or do not belong together; each fault has its class in
            builder/catalog.py.
    """
    catalog = open_catalog(dataset)
    rank, world_size = _world(rank, world_size)
    for name, value, least in (("max_tokens", max_tokens, 1), ("shuffle_seed", shuffle_seed, 0), ("epoch", epoch, 0)):
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}", mend=f"Give {least} or more")
    if remainder not in ("keep", "drop", "repeat"):
        raise UsageError(f"remainder is {remainder!r}", mend="Give 'keep', 'drop' or 'repeat'")
    options = StreamOptions(
        arrays=choose_arrays(states, catalog.manifest.layers),
        max_tokens=max_tokens,
        shuffle_seed=shuffle_seed,
        rank=rank,
        world_size=world_size,
        remainder=remainder,
    )
    return HiddenStateStream(catalog, options, epoch)


class HiddenStateStream(IterableDataset[DecodedSample]):
    """Samples as `eaglehs.decode` gives them: `key`, `input_ids` int32 [T], `loss_mask` uint8 [T], states bf16 [T, H].

    Tensors are views of the mapped shard and stay valid for as long as they are held; `clone` what is to be saved.
    With `DataLoader` use `batch_size=None`, or any batch size with `collate_fn=eaglehs.collate`.
    """

    def __init__(self, catalog: Catalog, options: StreamOptions, epoch: int) -> None:
        """Use `stream`, which checks the options."""
        self._catalog = catalog
        self._options = options
        self._cursor = SharedCursor(epoch)
        self._pass: Pass | None = None
        self._worker_pass: Pass | None = None
        self._first_rows = {row.shard: row for row in reversed(catalog.rows)}
        self._checked_shards: set[str] = set()
        self._part(epoch)  # `drop` with too few samples is refused here, not in the training loop

    @property
    def manifest(self) -> Manifest:
        """What the dataset is and how it was made."""
        return self._catalog.manifest

    @property
    def epoch(self) -> int:
        """The epoch that the next pass reads."""
        return self._cursor.epoch

    def __len__(self) -> int:
        """Samples of this rank in one epoch."""
        return len(self._part(self.epoch))

    def __iter__(self) -> Iterator[DecodedSample]:
        """Yield this rank's samples of the epoch, in a DataLoader worker every num_workers-th of them.

        Raises:
            DatasetMismatchError: a shard was exchanged for one of another packing.
            ShardCutError: a shard was cut since the stream was opened.
            StorageError: a shard can't be opened; or the workers' shared memory is too small for a sample.
        """
        info = get_worker_info()
        worker, num_workers = (None, 1) if info is None else (info.id, info.num_workers)
        self._pass = begun = self._begin(worker)
        part = worker_part(self._part(begun.epoch)[begun.position :], worker or 0, num_workers)
        for taken in range(begun.taken, len(part)):
            sample = self._load(self._catalog.rows[part[taken]])
            self._pass = replace(begun, taken=taken + 1)
            yield sample

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass read `epoch` from its start; the epoch that a loaded state is in keeps its position.

        Call it before each pass. It reaches workers that live on from the pass before.
        """
        if epoch < 0:
            raise UsageError(f"epoch is {epoch}", mend="Give 0 or more")
        if epoch != self.epoch:
            self._cursor.set(epoch, 0)
            self._pass = None

    def state_dict(self, num_consumed: int | None = None) -> dict[str, Any]:
        """Return where the loop stands, as JSON types: the same on all ranks that took as many samples.

        Without DataLoader workers the stream has counted. With them it can't, since they read ahead: give
        `num_consumed`, the samples that the loop took since the last `set_epoch` or `load_state_dict`. Called inside a
        worker, by a loader that keeps the state of each, it returns that worker's.

        Raises:
            UsageError: workers read the stream and no count is given; or the count is more than an epoch.
        """
        own = self._state()
        if own.worker is None:
            if num_consumed is not None:
                own = replace(own, epoch=self.epoch, position=self._cursor.position + num_consumed)
            elif self._cursor.is_read_by_workers:
                raise UsageError(
                    "DataLoader workers read this stream, and they read ahead of the loop",
                    mend="Give the number of samples that the loop has taken: state_dict(num_consumed=...)",
                )
            if not 0 <= own.position <= len(self):
                raise UsageError(
                    f"position {own.position} is not in an epoch of {len(self)} samples",
                    mend="Count num_consumed from the last set_epoch, and call that before each pass",
                )
        return codec.encode(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on after the samples that a loop had taken when it called `state_dict`.

        Costs nothing that grows with the position; the number of workers may be another one.

        Raises:
            UsageError: the state is of another dataset, seed, world size or remainder, or of another worker.
            RecordError: it is no state of a stream.
        """
        loaded = codec.decode(StreamState, state, where="the state of the stream")
        own = self._state()
        check_same_stream(loaded, own)
        if own.worker is None:
            self._cursor.set(loaded.epoch, loaded.position)
            self._pass = None
        else:  # the cells are shared: this worker's own position must not reach the others
            self._worker_pass = Pass(epoch=loaded.epoch, position=loaded.position, taken=loaded.taken)

    def _begin(self, worker: int | None) -> Pass:
        begun = self._cursor.begin(worker)
        resumed, self._worker_pass = self._worker_pass, None
        if resumed is not None:
            return resumed
        if begun.is_again and self._options.shuffle_seed is not None and not worker:
            warnings.warn(
                f"epoch {begun.epoch} is read again, in the same order; call set_epoch before each pass", stacklevel=3
            )
        return begun

    def _state(self) -> StreamState:
        info = get_worker_info()
        here = self._pass or Pass(epoch=self.epoch, position=self._cursor.position)
        return StreamState(
            dataset=self._catalog.fingerprint,
            shuffle_seed=self._options.shuffle_seed,
            world_size=self._options.world_size,
            remainder=self._options.remainder,
            epoch=here.epoch,
            position=here.position + (here.taken if info is None else 0),
            worker=None if info is None else info.id,
            num_workers=0 if info is None else info.num_workers,
            taken=0 if info is None else here.taken,
        )

    def _part(self, epoch: int) -> Order:
        options = self._options
        order = epoch_order(len(self._catalog.rows), options.shuffle_seed, epoch)
        return rank_part(order, options.rank, options.world_size, options.remainder)

    def _load(self, row: IndexRow) -> DecodedSample:
        path, options = self._catalog.shard_path(row), self._options
        if row.shard not in self._checked_shards:
            check_shard_is_its_own(path, self._first_rows[row.shard])
            self._checked_shards.add(row.shard)
        return {"key": row.key, **load_sample(path, row, options.arrays, max_tokens=options.max_tokens)}


def _world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank is {rank} and world_size {world_size}", mend="Give both or none")
    if rank is None or world_size is None:
        rank, world_size = _world_around()
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of {world_size}, which are 0..{world_size - 1}")
    return rank, world_size


def _world_around() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = ("RANK", "WORLD_SIZE")
    found = [os.environ.get(name, "") for name in names]
    if all(text.isdecimal() for text in found):
        return int(found[0]), int(found[1])
    return 0, 1
