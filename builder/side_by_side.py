"""Work on a list in threads, where the first failure ends it: nothing is begun any more, and it is what is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoppedError(Exception):
    """The failure of another thread, or Ctrl-C, ends the work; this part of it is given up."""


def side_by_side(
    task: Callable[[Item, threading.Event], Result], items: Iterable[Item], *, threads: int, name: str
) -> list[Result]:
    """Return the result of each item, in order; `task` may look at the event it is given and raise StoppedError.

    Copies, hashes, reads and sends let go of the GIL, so threads are enough. Returns or raises once no thread is at
    work. `name` is the threads' in a debugger.
    """
    stop = threading.Event()

    def work(item: Item) -> Result:
        if stop.is_set():
            raise StoppedError
        try:
            return task(item, stop)
        except BaseException:
            stop.set()  # by the thread that failed: who waits for results learns of it after the next item was begun
            raise

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name) as pool:
        try:
            futures = [pool.submit(work, item) for item in items]
            for future in as_completed(futures):
                if not isinstance(future.exception(), StoppedError):  # the failure that stopped it comes too
                    future.result()
        except BaseException:  # also Ctrl-C
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]
