"""Mapped ranges of files that the loop lets go and another thread unmaps.

To unmap is to take every page out of the process's page table: where the page cache holds small pages (tmpfs, older
kernels) a quarter of what copying the bytes costs. So the loop, when it lets go of the last view of a range, puts the
range into a queue, and a thread that does nothing else empties it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch

from .file_map import map_range

_Mapping = tuple[memoryview, Callable[[], object]]
"""Memory, and what unmaps it; the memory is kept until then, since its end unmaps, too."""


class LentMaps:
    """Maps ranges for one pass; what is still held when it is closed is unmapped by whoever lets go of it."""

    def __init__(self) -> None:
        """Start the thread, which `close` ends."""
        self._returned = _Returned()
        threading.Thread(target=self._returned.unmap, daemon=True, name="eaglehs-unmap").start()

    def take(self, path: Path, offset: int, length: int) -> torch.Tensor:
        """Return `length` bytes of `path` from `offset`, uint8; errors as `map_range`.

        The block is valid for as long as it, or a view of it, is held.
        """
        memory, shift, unmap = map_range(path, offset, length)
        piece = (ctypes.c_uint8 * length).from_buffer(memory, shift)
        # The array, not the tensor, is what every view holds on to.
        weakref.finalize(piece, self._returned.put, (memory, unmap)).atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8, count=length)

    def close(self) -> None:
        """Let the thread end once it has unmapped what came back."""
        self._returned.close()


class _Returned:
    """Mappings that nobody looks at any more; without locks, since a destructor may interrupt any other code."""

    def __init__(self) -> None:
        self._is_closed = False
        self._mappings: SimpleQueue[_Mapping | None] = SimpleQueue()

    def put(self, mapping: _Mapping) -> None:
        """Hand on what the caller lets go; one that comes while `close` runs goes with this record."""
        if not self._is_closed:
            self._mappings.put(mapping)

    def close(self) -> None:
        self._is_closed = True
        self._mappings.put(None)

    def unmap(self) -> None:
        while (mapping := self._mappings.get()) is not None:
            _, unmap = mapping
            unmap()  # not by the last reference: whoever let go may hold that until after this, and then it would unmap
            del mapping
