"""What a long run does so that its memory stays flat."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress

PLAIN_ALLOCATION: Mapping[str, str] = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Arrow's own pool keeps what it has freed: 40 MB of 398 MB at the peak of an extraction of 10,000 prompts, for tables
of some MB. Arrow reads this when it is first used; `pyarrow.set_memory_pool` comes too late for its Parquet writer."""

_M_ARENA_MAX = -8
"""glibc's number of the parameter, from its malloc.h."""

_ARENAS = 2
"""glibc gives each thread an arena, up to eight a core, and what is freed in one does not serve the others."""


def allocate_plainly() -> None:
    """Set the environment so, unless the user has, and bound glibc's arenas; call it before pyarrow is imported."""
    for name, value in PLAIN_ALLOCATION.items():
        os.environ.setdefault(name, value)
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
