"""What this process and all that it started hold in memory, without files' pages."""

import os
from collections.abc import Iterator
from pathlib import Path


def held_bytes() -> int:
    """Return anonymous and shared memory of the whole tree of processes, each shared page counted once.

    It is the proportional set size (PSS) without the share of files: their pages are the page cache's, mapped or not,
    and go when anybody needs the room.
    """
    return sum(_pss(pid) for pid in _tree(os.getpid()))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _tree(int(child))


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended just now
    fields = dict(line.split(":", 1) for line in lines[1:])
    return sum(1024 * int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
