"""Memory that readers fill and training loops look at, used again and again.

Fresh memory costs more than reading does: every page of a new 100 MB block is a fault and is zeroed first. The arena
is one stretch that is faulted in once. A piece of it is lent with each sample and comes back by itself when the last
tensor over it is gone, so nobody has to say how long a view lives: as long as it is held.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from queue import Empty, SimpleQueue

import torch

from .tar_header import pad_to

_PIECE_ALIGNMENT = 4096


class Arena:
    """One stretch of `size_bytes`, for any number of threads."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve addresses; memory is used from the low end, and only as far as it is needed."""
        self.size_bytes = pad_to(max(size_bytes, 1), _PIECE_ALIGNMENT)
        self._memory = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._lock = threading.Lock()  # never held by what returns a piece: that may interrupt its holder
        self._lent: list[tuple[int, int]] = []
        """(begin, end), ascending."""
        # SimpleQueue may be put to from a destructor that interrupts any other code, a Condition may not.
        self._returned: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.wake: SimpleQueue[None] = SimpleQueue()
        """Gets an item whenever a piece comes back."""

    @property
    def lent_bytes(self) -> int:
        """Bytes that tensors are held over."""
        with self._lock:
            self._take_back()
            return sum(end - begin for begin, end in self._lent)

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """Return a uint8 block of `size_bytes`, with what was in it before, or None where no gap is as large."""
        size = pad_to(max(size_bytes, 1), _PIECE_ALIGNMENT)
        with self._lock:
            self._take_back()
            begin = 0
            for number, (lent_begin, lent_end) in enumerate([*self._lent, (self.size_bytes, 0)]):
                if lent_begin - begin >= size:
                    self._lent.insert(number, (begin, begin + size))
                    return self._block(begin, size, size_bytes)
                begin = lent_end
        return None

    def _block(self, begin: int, size: int, size_bytes: int) -> torch.Tensor:
        piece = (ctypes.c_uint8 * max(size_bytes, 1)).from_buffer(self._memory, begin)
        # The array, not the tensor, is what every view holds on to.
        weakref.finalize(piece, _give_back, self._returned, self.wake, (begin, begin + size)).atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8, count=size_bytes)

    def _take_back(self) -> None:
        while True:
            try:
                self._lent.remove(self._returned.get_nowait())
            except Empty:
                return


def _give_back(returned: SimpleQueue[tuple[int, int]], wake: SimpleQueue[None], piece: tuple[int, int]) -> None:
    returned.put(piece)
    wake.put(None)
