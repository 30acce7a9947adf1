"""A packed dataset as a torch `IterableDataset`: read ahead, shuffled, split, resumable, no byte read in vain.

    for sample in eaglehs.stream("dataset", states=["layer_3", "final"], shuffle_seed=0): ...
    for sample in eaglehs.stream("org/name", revision="main"): ...

The index says where every array lies, so any sample can be had in any order at the same cost: a shuffle needs no
buffer, a rank reads only its own samples, resuming reads nothing twice. One process without workers is the fastest
way: threads read ahead of the loop, and samples are views of what they read. DataLoader workers work, and copy each
sample through shared memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..schemas import codec
from ..schemas.counts import counted
from ..schemas.errors import UsageError
from ..schemas.manifest import Manifest
from .decode import DecodedSample
from .opened import OpenedDataset, RemoteOptions, open_dataset
from .sample_order import Order, Remainder, epoch_order, rank_part, worker_part
from .sample_reads import choose_arrays
from .stream_options import (
    DatasetKind,
    Reading,
    Selection,
    Staging,
    check_numbers,
    choose_ranks,
    choose_reading,
)
from .stream_reader import SampleReader
from .stream_state import Pass, SharedCursor, StreamState, check_same_stream

if TYPE_CHECKING:
    import datasets


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
    batch_size: int | None = None,
    staging: Staging = "auto",
    prefetch_bytes: int | str = "1GB",
    verify: bool | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    connections: int = 16,
    cache_dir: str | Path | None = None,
) -> HiddenStateStream:
    """Open a packed dataset for reading.

    Args:
        dataset: the folder that `eaglehs pack` wrote; `org/name` or `hf://datasets/org/name[@revision]` on the Hub;
            `https://host/path`; or any URL that fsspec knows, such as `s3://bucket/path`.
        states: which states to read, such as `["layer_3", "final"]`; None for all. Ids and mask always come. Bytes of
            other states are not touched.
        max_tokens: longer samples lose their tail, unread, in all arrays alike.
        shuffle_seed: None keeps the order of the shards; a number shuffles all samples, anew each epoch, by seed and
            epoch alone.
        epoch: the epoch of the first pass; see `HiddenStateStream.set_epoch`.
        rank: which part of the samples this process reads, of `world_size`. None takes both from torch.distributed if
            it is initialised, else from the variables RANK and WORLD_SIZE, else 0 of 1. Processes that share one
            model (tensor parallel) must give the rank of their group, to see the same samples.
        world_size: see `rank`. Ranks see about as many tokens each (builder/sample_order.py).
        remainder: `keep` gives each sample once, so that some ranks may see one more; `drop` and `repeat` let all
            ranks end together.
        batch_size: that of a DataLoader with workers, 1 if it makes no batches (`batch_size=None`). It asks its workers
            for a batch in turn, so each reads whole batches, and the loop sees the rank's order; with another one here
            it sees the same samples in another order, and can't resume by their count. None reads as 1 does, and
            refuses such a count unless `eaglehs.collate` made the batches. A `collate_fn` that does not call it must
            call `note_batch`, or a wrong number given here goes unseen. Of no effect without workers.
        staging: where samples lie: see builder/stream_options.py. The default fits.
        prefetch_bytes: how much is read ahead of the loop, as bytes or `"1GB"`.
        verify: hold each array that is read whole against its checksum. None does so for remote datasets.
        device: a GPU to which samples are copied, on a stream of their own, while the loop computes.
        revision: branch, tag or commit of a dataset on the Hub; it is looked up once, when the stream is opened. A
            warning tells if `main` has another manifest than that revision by now.
        connections: how many ranges of a remote dataset are asked for at a time.
        cache_dir: keep whole shards of a remote dataset in this folder; later passes read them from there.

    Raises:
        UsageError: an option can't be; or no packed dataset is there.
        DataError: manifest, index and shards are damaged or do not belong together; each fault has its class in
            builder/catalog.py.
        StorageError: a server or the Hub does not answer, or refuses.
    """
    check_numbers(max_tokens=(max_tokens, 1), shuffle_seed=(shuffle_seed, 0), epoch=(epoch, 0))
    check_numbers(connections=(connections, 1), batch_size=(batch_size, 1))
    ranks = choose_ranks(rank, world_size, remainder)
    cache = None if cache_dir is None else Path(cache_dir)
    remote = RemoteOptions(revision=revision, connections=connections, cache_dir=cache)
    opened = open_dataset(dataset, remote)
    selection = Selection(
        arrays=choose_arrays(states, opened.catalog.manifest.layers),
        max_tokens=max_tokens,
        shuffle_seed=shuffle_seed,
        ranks=ranks,
        batch_size=batch_size,
    )
    kind = DatasetKind(is_remote=opened.is_remote, codec=opened.catalog.manifest.codec)
    reading = choose_reading(staging, prefetch_bytes, verify=verify, device=device, kind=kind)
    return HiddenStateStream(opened, selection, reading, epoch)


class HiddenStateStream(IterableDataset[DecodedSample]):
    """Samples as `eaglehs.decode` gives them: `key`, `input_ids` int32 [T], `loss_mask` uint8 [T], states bf16 [T, H].

    Tensors are views of the mapped shard, or of memory that is read into again once nothing refers to it: they stay
    valid for as long as they are held, and what the loop holds on to is memory that it has to pay for.
    With `DataLoader` use `batch_size=None`, or any batch size with `collate_fn=eaglehs.collate`, and if it has workers
    give that batch size to `stream` too.
    """

    def __init__(self, opened: OpenedDataset, selection: Selection, reading: Reading, epoch: int) -> None:
        """Use `stream`, which checks the options."""
        self._catalog = opened.catalog
        self._selection = selection
        self._reader = SampleReader(opened, selection, reading)
        self._cursor = SharedCursor(epoch)
        self._pass: Pass | None = None
        self._worker_pass: Pass | None = None
        self._num_batched = 0
        self._parts: dict[int, Order] = {}
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
        """Yield this rank's samples of the epoch, in a DataLoader worker every num_workers-th batch of them.

        Raises:
            DatasetMismatchError: a shard is of another packing, or was written again after the stream was opened.
            ShardCutError: a shard was cut since the stream was opened.
            FlippedBitsError: an array does not have its checksum, where `verify` is on.
            CodedBlockError, PlanesHeadError: a coded state is damaged, whether `verify` is on or not.
            StorageError: a shard can't be opened or a server does not answer; or the workers' shared memory is too
                small for a sample.
        """
        info = get_worker_info()
        return self._read(None, 0) if info is None else self._read(info.id, info.num_workers)

    def note_batch(self) -> None:
        """Take note, in a DataLoader worker, that a batch was made of what it read since the last; `collate` does.

        A `collate_fn` that does not call that one calls `get_worker_info().dataset.note_batch()`.
        """
        info = get_worker_info()
        if info is not None and self._pass is not None:
            self._cursor.note_batch(info.id, self._pass.taken - self._num_batched)
            self._num_batched = self._pass.taken

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
            UsageError: workers read the stream and no count is given; they made batches of another size than the
                stream's, or of one that nobody has told; or the count is more than an epoch.
        """
        own = self._state()
        if own.worker is None:
            if num_consumed is not None:
                self._check_batches(num_consumed)
                own = replace(own, epoch=self.epoch, position=self._cursor.position + num_consumed)
            elif self._cursor.is_read_by_workers:
                raise UsageError(
                    "DataLoader workers read this stream, and they read ahead of the loop",
                    mend="Give the number of samples that the loop has taken: state_dict(num_consumed=...)",
                )
            self._check_position(own, mend="Count num_consumed from the last set_epoch, and call that before each pass")
        return codec.encode(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on after the samples that a loop had taken when it called `state_dict`.

        Costs nothing that grows with the position; the number of workers may be another one.

        Raises:
            UsageError: the state is of another dataset, seed, world size or remainder, or of another worker; or it
                points out of an epoch.
            RecordError: it is no state of a stream.
        """
        loaded = codec.decode(StreamState, state, where="the state of the stream")
        own = self._state()
        check_same_stream(loaded, own)
        check_numbers(epoch=(loaded.epoch, 0), taken=(loaded.taken, 0))
        self._check_position(loaded, mend="Give a state as state_dict returned it")
        if own.worker is None:
            self._cursor.set(loaded.epoch, loaded.position)
            self._pass = None
        else:  # the cells are shared: this worker's own position must not reach the others
            self._worker_pass = Pass(epoch=loaded.epoch, position=loaded.position, taken=loaded.taken)

    def to_datasets(self) -> datasets.IterableDataset:
        """Return the stream as a `datasets.IterableDataset`: the same rows in the same order, bfloat16 left as it is.

        `set_epoch`, `state_dict` and ranks stay this stream's: `datasets`' own would read and throw away. Give rank and
        world_size to `stream` or call `split_dataset_by_node`, never both. Of DataLoader workers one reads, as of any
        dataset of one shard.
        """
        import datasets

        return datasets.IterableDataset.from_generator(self._read_whole)

    def _read(self, worker: int | None, num_workers: int) -> Iterator[DecodedSample]:
        """Yield the samples of one reader: `worker` of `num_workers`, or all of them where there are no workers."""
        self._pass = begun = self._begin(worker)
        self._num_batched = begun.taken
        part = self._part(begun.epoch)[begun.position :]
        part = worker_part(part, worker or 0, num_workers or 1, self._selection.worker_batch)[begun.taken :]
        rows = (self._catalog.rows[number] for number in part)
        with closing(self._reader.read(rows, len(part), num_workers=num_workers)) as samples:
            for taken, sample in enumerate(samples, start=begun.taken + 1):
                self._pass = replace(begun, taken=taken)
                yield sample
                del sample  # else its memory would be held while the next is waited for

    def _check_position(self, state: StreamState, *, mend: str) -> None:
        if not 0 <= state.position <= len(self):
            raise UsageError(
                f"position {state.position} is not in an epoch of {counted(len(self), 'sample')}", mend=mend
            )

    def _check_batches(self, num_consumed: int) -> None:
        """Refuse a count of samples from workers that are not the next ones of the rank's order."""
        found, own = self._cursor.batch_size, self._selection.worker_batch
        if num_consumed and not found and self._selection.batch_size is None and self._cursor.is_read_by_workers:
            raise UsageError(
                "nobody has told which batches the DataLoader makes of this stream",
                why="Its workers are asked for a batch in turn, so the samples that the loop has taken depend on the "
                "size; eaglehs.collate tells it, another collate_fn or none does not",
                mend="Give the DataLoader's batch size to the stream, eaglehs.stream(..., batch_size=N), and 1 if the "
                "DataLoader has batch_size=None",
            )
        is_full = found >= min(own, len(self) - self._cursor.position)
        if num_consumed and found and (found > own or not is_full):
            raise UsageError(
                f"DataLoader workers make batches of {counted(found, 'sample')}, the stream reads for batches of {own}",
                why="The loop has not taken the next samples in order: after a resume some would be lost or seen twice",
                mend=f"Give the DataLoader's batch size to the stream: eaglehs.stream(..., batch_size={found})",
            )

    def _read_whole(self) -> Iterator[DecodedSample]:
        """Yield all: `datasets` gives a dataset of one shard, as this is, to one of its workers alone."""
        return self._read(None, 0) if get_worker_info() is None else self._read(0, 1)

    def _begin(self, worker: int | None) -> Pass:
        begun = self._cursor.begin(worker)
        resumed, self._worker_pass = self._worker_pass, None
        if resumed is not None:
            return resumed
        if begun.is_again and self._selection.shuffle_seed is not None and not worker:
            warnings.warn(
                f"epoch {begun.epoch} is read again, in the same order; call set_epoch before each pass", stacklevel=3
            )
        return begun

    def _state(self) -> StreamState:
        info = get_worker_info()
        here = self._pass or Pass(epoch=self.epoch, position=self._cursor.position)
        return StreamState(
            dataset=self._catalog.fingerprint,
            shuffle_seed=self._selection.shuffle_seed,
            world_size=self._selection.ranks.world_size,
            remainder=self._selection.ranks.remainder,
            epoch=here.epoch,
            position=here.position + (here.taken if info is None else 0),
            worker=None if info is None else info.id,
            num_workers=0 if info is None else info.num_workers,
            taken=0 if info is None else here.taken,
            batch_size=1 if info is None else self._selection.worker_batch,
        )

    def _part(self, epoch: int) -> Order:
        if epoch not in self._parts:
            order = epoch_order(len(self._catalog.rows), self._selection.shuffle_seed, epoch)
            num_tokens = [row.num_tokens for row in self._catalog.rows]
            self._parts = {epoch: rank_part(order, num_tokens, self._selection.ranks)}
        return self._parts[epoch]
