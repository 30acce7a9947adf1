"""One pass over samples of a stream: source, loader and threads put together as the options and the process ask.

In the training process samples are views of mapped files or of reused memory. In a DataLoader worker they are views of
reused memory too, which torch copies to shared memory on their way out and gives back.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing

from ..schemas.errors import UsageError
from ..schemas.index import IndexRow
from ..schemas.states import Codec
from .arena import Arena
from .decode import DecodedSample
from .device_copy import on_device
from .loaders import Loader, MappedLoader, Memory, StagedLoader, Wanted
from .opened import OpenedDataset
from .prefetch import Prefetcher
from .sample_reads import plan_reads
from .shard_source import LocalReader, ShardReader
from .stream_options import Reading, Selection
from .worker_count import decode_threads


class SampleReader:
    """Reads rows in the order that they are given; picklable, until the first pass has begun."""

    def __init__(self, opened: OpenedDataset, selection: Selection, reading: Reading) -> None:
        """Nothing is opened before the first pass."""
        self._catalog = opened.catalog
        self._source = opened.source
        self._reading = reading
        self._wanted = Wanted(arrays=selection.arrays, max_tokens=selection.max_tokens, verify=reading.verify)
        self._first_rows = {row.shard: row for row in reversed(opened.catalog.rows)}
        self._arena: Arena | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the arena out: a process has its own."""
        return self.__dict__ | {"_arena": None}

    def read(
        self, rows: Iterable[IndexRow], num_rows: int, *, num_workers: int
    ) -> Generator[DecodedSample, None, None]:
        """Yield each row's sample; `num_workers` of the DataLoader that this process is a worker of, 0 for none.

        Raises:
            What `HiddenStateStream.__iter__` does.
        """
        if num_rows == 0:
            return
        device = self._reading.device
        if device is not None and device.type != "cpu" and num_workers:
            raise UsageError(
                f"device={str(device)!r} in a DataLoader worker", mend="Use num_workers=0: the stream reads ahead"
            )
        reader = self._source.open(self._first_rows)
        try:
            ahead = self._reading.prefetch_bytes // max(1, num_workers)
            threads = reader.threads
            if self._catalog.manifest.codec is not Codec.PLAIN:
                threads = max(threads, decode_threads())
            threads = max(1, threads // max(1, num_workers))
            with (
                closing(self._loader(reader, num_workers)) as loader,
                Prefetcher(rows, loader, ahead_bytes=ahead, threads=threads) as prefetcher,
            ):
                samples: Iterable[DecodedSample] = ({"key": row.key, **tensors} for row, tensors in prefetcher)
                yield from samples if device is None else on_device(samples, device)
        finally:
            reader.close()

    def _loader(self, reader: ShardReader, num_workers: int) -> Loader:
        staging = self._reading.staging
        if num_workers:  # an arena of the pass: one of the stream may be a fork of one that other threads were using
            return StagedLoader(reader, self._wanted, "shared", self._new_arena(num_workers))
        if staging == "map":
            assert isinstance(reader, LocalReader), "mapping what is remote is refused when the stream is opened"
            return MappedLoader(reader, self._catalog.shard_path, self._wanted)
        memory: Memory = "pinned" if staging == "pinned" else "arena"
        return StagedLoader(reader, self._wanted, memory, self._own_arena() if memory == "arena" else None)

    def _own_arena(self) -> Arena:
        self._arena = self._arena or self._new_arena(1)
        return self._arena

    def _new_arena(self, num_processes: int) -> Arena:
        largest = max(self._catalog.rows, key=lambda row: row.num_tokens)
        reads = plan_reads(largest, self._wanted.arrays, self._wanted.max_tokens)
        # one with the loop and one being read, however large
        return Arena(max(self._reading.prefetch_bytes // num_processes, 2 * reads.block_bytes + 2**20))
