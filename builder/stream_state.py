"""Where a stream stands: the epoch and the position, shared with DataLoader workers, and as a record to resume from.

Workers are copies of the stream in other processes, made before the training loop says which epoch it is (persistent
workers live through all of them). So the epoch and the position to begin at lie in shared memory. How far the loop has
come, only the loop knows: workers read ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..schemas.errors import UsageError

_EPOCH, _POSITION, _GENERATION, _IN_WORKERS, _BEGUN = range(5)
_SLOTS = 5
_MAX_READERS = 513
"""The process itself and up to 512 workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """What `HiddenStateStream.state_dict` holds, as JSON types."""

    KIND: ClassVar[str] = "eaglehs.stream"
    VERSION: ClassVar[int] = 1

    dataset: str
    """xxh3_128 of its manifest."""

    shuffle_seed: int | None
    world_size: int
    remainder: str
    epoch: int
    position: int
    """Samples of this rank's part of the epoch that the loop has taken; the same on ranks that are in step."""

    worker: int | None = None
    """Set in a state that was made inside a DataLoader worker: which of `num_workers` it was."""

    num_workers: int = 0
    taken: int = 0
    """Samples that this worker has handed out since `position`."""

    batch_size: int = 1
    """Samples that each worker reads in one go; by this, too, it depends which are this worker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One reading of an epoch, by the process itself or by one worker."""

    epoch: int
    position: int
    """Samples of the rank's part of the epoch that were taken before it began."""

    taken: int = 0
    """Samples that this reader has handed out since."""

    is_again: bool = False
    """Whether this reader began this very epoch before, from its start."""


def check_same_stream(loaded: StreamState, own: StreamState) -> None:
    """Refuse a state of another stream.

    Raises:
        UsageError: names the first thing that differs, with both values.
    """
    for name in ("dataset", "shuffle_seed", "world_size", "remainder"):
        there, here = getattr(loaded, name), getattr(own, name)
        if there != here:
            raise UsageError(
                f"the state of the stream was made with another {name}: {there} there, {here} here",
                why="The order of samples would be another, and some would be lost or seen twice",
            )
    there, here = (_reader(state) for state in (loaded, own))
    if there != here:
        raise UsageError(
            f"the state is of {there}, this is {here}",
            mend="Resume with the same number of workers, or save stream.state_dict(num_consumed=...) instead",
        )


def _reader(state: StreamState) -> str:
    if state.worker is None:
        return "no worker"
    return f"worker {state.worker} of {state.num_workers}, in batches of {state.batch_size}"


class SharedCursor:
    """The epoch to read and the position to begin at; copies in worker processes see changes."""

    def __init__(self, epoch: int) -> None:
        """Begin at the start of `epoch`."""
        self._cells = torch.zeros(_SLOTS + 3 * _MAX_READERS, dtype=torch.int64)
        self._cells.share_memory_()  # type: ignore[no-untyped-call]  # torch has not typed it
        self._cells[_EPOCH] = epoch
        self._cells[_GENERATION] = 1

    @property
    def epoch(self) -> int:
        """The epoch that the next pass reads."""
        return int(self._cells[_EPOCH])

    @property
    def position(self) -> int:
        """The position at which the epoch's first pass begins."""
        return int(self._cells[_POSITION])

    @property
    def is_read_by_workers(self) -> bool:
        """Whether a worker has begun a pass since the epoch or position was last set."""
        return bool(self._cells[_IN_WORKERS])

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch that a worker has made since then; 0 where none has told of one."""
        return int(self._batches.max())

    def note_batch(self, worker: int, num_samples: int) -> None:
        """Take note of a batch that the worker `worker` has made; each has a cell of its own, so none is lost."""
        self._batches[worker] = max(num_samples, int(self._batches[worker]))

    def set(self, epoch: int, position: int) -> None:
        """Set where the next pass begins, in all processes."""
        self._cells[_EPOCH] = epoch
        self._cells[_POSITION] = position
        self._cells[_IN_WORKERS] = 0
        self._batches[:] = 0
        self._cells[_GENERATION] += 1

    def begin(self, worker: int | None) -> Pass:
        """Begin a pass in this process, or in the worker `worker`: the first one at the position, later ones at 0."""
        reader = 0 if worker is None else 1 + worker
        generation, epoch = int(self._cells[_GENERATION]), self.epoch
        used, begun = self._cells[_SLOTS:].view(-1, _MAX_READERS)[:2]
        position = self.position if int(used[reader]) != generation else 0
        is_again = position == 0 and int(begun[reader]) == 1 + epoch
        begun[reader] = 1 + epoch
        used[reader] = generation
        if worker is None:
            used[:] = generation  # a later pass through workers is a second pass too
        else:
            used[0] = generation
            self._cells[_IN_WORKERS] = 1
        return Pass(epoch=epoch, position=position, is_again=is_again)

    @property
    def _batches(self) -> torch.Tensor:
        return self._cells[_SLOTS + 2 * _MAX_READERS :]
