"""The client: prompts through an engine into the run, many at a time, each one checked before it counts.

A sample is asked for, its dumps are checked, kept and written into the ledger. A fault of one sample is tried again
with a new attempt number and then recorded; a fault that may pass (a busy server, a broken connection) is waited out.
Too many failed samples, or a fault of the engine or the disk, end the run with everything that was finished kept.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.counts import counted
from ..schemas.dump import RequestId
from ..schemas.errors import DataError, EaglehsError, StorageError
from ..schemas.progress import Progress
from ..schemas.prompt import Prompt
from ..schemas.sample import CheckedSample
from .engines.protocol import Answer, Engine, EngineDownError, PassingError
from .keeper import Keeper
from .room import check_room
from .spool import Spool, num_workers

Check = Callable[[Prompt, Answer], CheckedSample]
"""Builds a checked sample from a prompt and the engine's answer, or raises DataError; the builder's `check_dumps`."""


ROOM_POLL_S = 0.2
"""Between two looks at a disk that is full and is being freed."""


class CachedRowsError(DataError):
    """The server took tokens from its prefix cache, so their states were never computed."""

    def __init__(self, key: str, cached_tokens: int) -> None:
        """Name the sample and the rows."""
        self.key = key
        self.cached_tokens = cached_tokens
        super().__init__(
            f"{key}: rows 0..{cached_tokens - 1} are missing",
            why=f"The server took {counted(cached_tokens, 'token')} from its prefix cache and never computed them",
            mend="Restart it with --disable-radix-cache",
        )


class TooManyFailuresError(DataError):
    """More samples failed than the run may lose."""

    def __init__(self, failures: Sequence[Failure], max_failed: int) -> None:
        """Name the first failures and the commonest reason."""
        self.failures = tuple(failures)
        reason, count = Counter(failure.reason for failure in failures).most_common(1)[0]
        super().__init__(
            f"{counted(len(failures), 'sample')} failed, more than --max-failed {max_failed} allows",
            why=f"First: {failures[0].key}. Commonest reason ({counted(count, 'time')}): {reason}",
            mend="Mend the cause and run the same command again: finished samples are kept",
        )


class NothingAnsweredError(EngineDownError):
    """A fault that should have passed outlasted all waiting, and nothing else was finished meanwhile either."""

    def __init__(self, fault: PassingError, num_tries: int, waited_s: float) -> None:
        """`fault` is the last one."""
        super().__init__(
            f"the server has finished no request in {counted(num_tries, 'try', 'tries')} over {waited_s:.0f} s",
            why=f"Last: {fault}",
            mend="See its log. The same command goes on with the run once the server is well",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A sample that failed for good."""

    key: str
    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How the client works; none of it changes a row."""

    max_attempts: int = 2
    """Tries for one sample before it is recorded as failed."""

    max_failed: int = 10
    """Failed samples that the run may have before it stops."""

    spool_bytes: int | None = None
    """Most bytes of dumps that may be under way or waiting to be kept; None: no bound but the concurrency."""

    bytes_per_token: int = 0
    """Of a dump; what `spool_bytes` is reckoned with."""

    keep_dir: Path | None = None
    """Where samples are kept, if its free space is to be watched."""

    frees_room: Callable[[], bool] | None = None
    """Tells whether room in `keep_dir` is being freed, so that one waits for it instead of ending the run."""

    waits_s: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16, 30, 30, 30)
    """Pauses before a sample is asked for again whose fault may pass: two minutes in all."""


@dataclass(slots=True)
class Tally:
    """What has been done so far; handed on from one client to the next where the engine is started again."""

    num_done: int = 0
    num_tokens: int = 0
    failures: list[Failure] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def outcome(self) -> Outcome:
        """Return it as a result."""
        return Outcome(num_done=self.num_done, num_tokens=self.num_tokens, failures=tuple(self.failures))

    def keep(self, prompt: Prompt) -> None:
        """Count a finished sample; from any thread."""
        with self._lock:
            self.num_done += 1
            self.num_tokens += prompt.num_tokens

    def fail(self, failure: Failure, max_failed: int) -> None:
        """Count a failed sample.

        Raises:
            TooManyFailuresError: more than `max_failed` have failed.
        """
        self.failures.append(failure)
        if len(self.failures) > max_failed:
            raise TooManyFailuresError(self.failures, max_failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one start of a run did."""

    num_done: int
    num_tokens: int
    failures: tuple[Failure, ...]


class Client:
    """Runs prompts through one engine into one run."""

    def __init__(self, engine: Engine, store: Keeper, check: Check, settings: ClientSettings) -> None:
        """The engine is started, the store open; both outlive the client."""
        self.engine = engine
        self.store = store
        self.check = check
        self.settings = settings
        self.tally = Tally()
        self._halt: StorageError | None = None
        self._num_busy = 0
        self._spool = Spool(settings.spool_bytes, settings.bytes_per_token)
        self._requests = asyncio.Semaphore(engine.concurrency)
        self.under_way: dict[str, Prompt] = {}
        """Key -> prompt of the requests that were sent and did not come back; after an EngineDownError the suspects."""

    async def run(self, prompts: Sequence[Prompt], progress: Progress, *, concurrency: int | None = None) -> Outcome:
        """Extract all `prompts`, at most `concurrency` (the engine's, if None) at a time.

        Raises:
            TooManyFailuresError: more than `max_failed` samples failed.
            EngineError, StorageError: the server or the disk failed; what was finished is kept.
            OSError: the disk failed where nobody has put it into words.
        """
        queue = iter(prompts)  # shared: each worker takes the next prompt
        concurrency = concurrency or self.engine.concurrency
        # More workers than requests: while samples are checked and kept, the engine has its next requests already.
        self._requests = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(num_workers(concurrency), len(prompts))):
                    workers.create_task(self._work(queue, progress))
        except* (EaglehsError, OSError) as faults:
            raise _worst(faults) from None
        if self._halt is not None:
            raise self._halt
        return self.tally.outcome()

    async def _work(self, queue: Iterator[Prompt], progress: Progress) -> None:
        for prompt in queue:
            async with self._spool.room(prompt.num_tokens, self._see_to_room):
                if self._halt is not None:
                    return
                self._num_busy += 1
                try:
                    failure = await self._extract(prompt, progress)
                finally:
                    self._num_busy -= 1
            if failure is not None:
                progress.note(f"failed: {failure.reason}")
                self.tally.fail(failure, self.settings.max_failed)

    async def _see_to_room(self, size_bytes: int) -> None:
        """Wait until a sample of `size_bytes` can be kept with those under way; or halt, and those are kept.

        Called in the sample's turn, so that those behind it are not counted: samples that wait together would keep each
        other out of a disk that has room for each.
        """
        while self._halt is None and self.settings.keep_dir is not None:
            may_come = self._room_comes()  # asked first: what was freed by then is seen by the look that follows
            try:
                check_room(self.settings.keep_dir, self._spool.used_bytes + size_bytes)
                break
            except StorageError as fault:
                if not may_come:
                    self._halt = fault
            await asyncio.sleep(ROOM_POLL_S)

    def _room_comes(self) -> bool:
        """Tell whether room may come: by what frees it, or by samples under way.

        One that is kept already counts twice until it is done with; and it may fill a shard up for what frees room.
        """
        return self._num_busy > 0 or (self.settings.frees_room is not None and self.settings.frees_room())

    async def _extract(self, prompt: Prompt, progress: Progress) -> Failure | None:
        num_done, num_faults, num_waits = self.tally.num_done, 0, 0
        while num_faults < self.settings.max_attempts:
            attempt = self.store.attempt_number(num_faults + num_waits)
            try:
                await self._attempt(prompt, attempt, progress)
            except PassingError as fault:
                reason = str(fault)
                if num_waits == len(self.settings.waits_s):
                    if fault.concerns_all and self.tally.num_done == num_done:
                        raise NothingAnsweredError(fault, num_waits + 1, sum(self.settings.waits_s)) from None
                    break
                await asyncio.sleep(self.settings.waits_s[num_waits])
                num_waits += 1
            except DataError as fault:
                reason = str(fault)
                num_faults += 1
            else:
                return None
        await asyncio.to_thread(self.store.fail, prompt, reason, attempt)
        return Failure(key=prompt.key, id=prompt.id, reason=reason)

    async def _attempt(self, prompt: Prompt, attempt: int, progress: Progress) -> None:
        rid = RequestId(run=self.store.record.run_id, key=prompt.key, attempt=attempt)
        answer = await self._ask(prompt, str(rid))
        try:
            if answer.cached_tokens:
                raise CachedRowsError(prompt.key, answer.cached_tokens)
            checked = await asyncio.to_thread(self.check, prompt, answer)
        except DataError:
            answer.remove_dumps()
            raise

        def keep() -> None:
            self.store.finish(prompt, checked, answer, attempt)
            self.tally.keep(prompt)
            size_bytes = sum(dump.size_bytes for dump in checked.dumps)
            progress.advance(num_samples=1, num_tokens=prompt.num_tokens, size_bytes=size_bytes)

        # Shielded: a sample that is being kept is kept, even when Ctrl-C or a fault elsewhere cancels this task. So it
        # is counted where it is kept: nobody comes back to a task that was cancelled.
        await asyncio.shield(asyncio.to_thread(keep))

    async def _ask(self, prompt: Prompt, rid: str) -> Answer:
        # Given back by hand: not after a fault of the engine, or a waiting prompt would go to the dead server.
        await self._requests.acquire()
        self.under_way[prompt.key] = prompt
        try:
            answer = await self.engine.capture(prompt, rid)
        except DataError:
            self._is_back(prompt)
            raise
        self._is_back(prompt)
        return answer

    def _is_back(self, prompt: Prompt) -> None:
        del self.under_way[prompt.key]
        self._requests.release()


def _worst(faults: BaseExceptionGroup[EaglehsError | OSError]) -> EaglehsError | OSError:
    """Return the fault that the user must see: the one that stands for the engine or disk before one of a sample."""
    found: list[EaglehsError | OSError] = []

    def gather(group: BaseExceptionGroup[EaglehsError | OSError]) -> None:
        for fault in group.exceptions:
            gather(fault) if isinstance(fault, BaseExceptionGroup) else found.append(fault)

    gather(faults)
    return max(found, key=lambda fault: fault.exit_code if isinstance(fault, EaglehsError) else 0)
