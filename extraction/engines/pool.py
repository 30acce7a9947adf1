"""Several servers as one engine: work goes where least is under way, and away from a server that fails.

Each server has a dump folder of its own. What was under way at a server that fails is asked again of the others, one
prompt at a time: if a prompt is what kills servers, it must not take the last one with it (`ServerKillerError`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...schemas.counts import counted
from ...schemas.errors import DataError, EaglehsError, EngineError, StorageError, UsageError
from ...schemas.prompt import Prompt
from ...schemas.run import EngineFacts
from .protocol import Answer, Engine

MAX_DEATHS = 2
"""Servers that may fail while one prompt is under way there, before no other is asked."""

BETWEEN_COMMANDS = ";"
"""In run.json's server command, where there are several."""


class NamedServer(Protocol):
    """As much of a server as a message names."""

    url: str


class ServerEngine(Engine, Protocol):
    """An engine that is one server: `SglangEngine`."""

    @property
    def server(self) -> NamedServer:
        """The server."""
        ...


class UnlikeServersError(UsageError):
    """Two servers would give one run states of two kinds."""

    def __init__(self, what: str, first: tuple[str, str], other: tuple[str, str]) -> None:
        """`first` and `other` are (URL, value)."""
        super().__init__(
            f"the servers differ in {what}: {first[0]} has {first[1]}, {other[0]} has {other[1]}",
            why="A run has one record of what computed its states",
            mend="Give servers that are alike",
        )


class NoServerLeftError(EngineError):
    """Every server has failed."""

    def __init__(self, faults: Sequence[tuple[str, EaglehsError]], suspects: Sequence[str]) -> None:
        """`faults` are (URL, why it was given up), in order; `suspects` keys of prompts that saw several fail."""
        self.faults = tuple(faults)
        self.suspects = tuple(suspects)
        last = faults[-1][1]
        told = "".join(f"\n  {url}: {fault.what}" for url, fault in faults)
        named = f"Prompts that were under way at more than one of them: {', '.join(suspects[:5])}"
        super().__init__(
            f"none of {counted(len(faults), 'server')} is left:{told}\n",
            why=named if suspects else last.why,
            mend="Start them again, and run the same command: finished samples are kept",
        )


class ServerKillerError(DataError):
    """Servers fail while one prompt is under way."""

    def __init__(self, prompt: Prompt, urls: Sequence[str]) -> None:
        """`urls` are the servers that failed with it."""
        self.key = prompt.key
        self.urls = tuple(urls)
        super().__init__(
            f"{prompt.key}: {counted(len(urls), 'server')} failed while it was under way ({', '.join(urls)})",
            why="The prompt itself may bring servers down; it is not sent to another one",
            mend="See the servers' logs; leave the prompt out, or cut it with --max-tokens",
        )


@dataclass(slots=True, eq=False)
class _Member:
    engine: ServerEngine
    under_way: set[asyncio.Task[Answer]] = field(default_factory=set)
    fault: EaglehsError | None = None
    """Why it was given up."""

    @property
    def url(self) -> str:
        return self.engine.server.url

    @property
    def has_room(self) -> bool:
        return self.fault is None and len(self.under_way) < self.engine.concurrency

    @property
    def load(self) -> float:
        return len(self.under_way) / self.engine.concurrency


class PoolEngine:
    """Shares prompts among servers that have passed their checks. For one event loop."""

    def __init__(self, engines: Sequence[ServerEngine], note: Callable[[str], None]) -> None:
        """`note` tells the user of a server that is given up.

        Raises:
            UnlikeServersError: the servers differ in a way that the run's record can't tell.
        """
        assert engines, "a pool of nothing"
        self.concurrency = sum(engine.concurrency for engine in engines)
        self.facts = _facts_of_all(engines)
        self._note = note
        self._members = [_Member(engine) for engine in engines]
        self._lost: list[_Member] = []
        self._room = asyncio.Condition()
        self._one_suspect = asyncio.Lock()
        self._deaths: dict[str, list[str]] = {}
        """Key of a prompt -> URLs of the servers that failed while it was under way there."""

    @property
    def lost(self) -> tuple[tuple[str, EaglehsError], ...]:
        """The servers that were given up, in order: (URL, why)."""
        return tuple((member.url, member.fault) for member in self._lost if member.fault is not None)

    async def capture(self, prompt: Prompt, rid: str) -> Answer:
        """Run one prompt on some server and return when its dumps are whole in that server's folder.

        Raises:
            DataError: this prompt failed, or has been under way at too many servers that failed.
            NoServerLeftError: every server has failed.
        """
        while True:
            is_suspect = prompt.key in self._deaths
            async with self._one_suspect if is_suspect else contextlib.nullcontext():
                self._refuse_killer(prompt)
                member, work = await self._start(prompt, rid)
                answer = await self._finish(member, work)
            if answer is not None:
                return answer
            self._deaths.setdefault(prompt.key, []).append(member.url)

    async def _start(self, prompt: Prompt, rid: str) -> tuple[_Member, asyncio.Task[Answer]]:
        """Send a prompt to the server with the least under way, when one has room."""
        async with self._room:
            await self._room.wait_for(lambda: not self._alive() or any(map(_has_room, self._members)))
            if not self._alive():
                raise NoServerLeftError(self.lost, _suspects(self._deaths))
            member = min(filter(_has_room, self._members), key=lambda member: member.load)
            work = asyncio.create_task(member.engine.capture(prompt, rid))
            member.under_way.add(work)
            return member, work

    async def _finish(self, member: _Member, work: asyncio.Task[Answer]) -> Answer | None:
        """Return a server's answer, or None where the server has failed meanwhile."""
        me = asyncio.current_task()
        try:
            return await work
        except (EngineError, StorageError) as fault:
            # A StorageError here is of that server's dump folder; the run's own disk is the client's matter.
            self._give_up(member, fault)
        except asyncio.CancelledError:
            if member.fault is None or (me is not None and me.cancelling()):
                raise  # it is we who are cancelled, not the request
        finally:
            member.under_way.discard(work)
            async with self._room:
                self._room.notify_all()
        return None

    def _give_up(self, member: _Member, fault: EaglehsError) -> None:
        """Ask nothing more of a server, and take back what is under way there."""
        if member.fault is not None:
            return
        member.fault = fault
        self._lost.append(member)
        num_moved, others = len(member.under_way), len(self._alive())
        for work in member.under_way:
            work.cancel()  # a server that hangs would keep each of them for its whole time limit
        if others:
            self._note(
                f"server {member.url} is given up ({len(self._lost)} of {len(self._members)}): {fault.what}; "
                f"{counted(num_moved, 'prompt under way there goes', 'prompts under way there go')} "
                f"to the other {others}"
            )

    def _alive(self) -> list[_Member]:
        return [member for member in self._members if member.fault is None]

    def _refuse_killer(self, prompt: Prompt) -> None:
        urls = self._deaths.get(prompt.key, ())
        if len(urls) >= MAX_DEATHS and self._alive():
            raise ServerKillerError(prompt, urls)


def _has_room(member: _Member) -> bool:
    return member.has_room


def _suspects(deaths: Mapping[str, Sequence[str]]) -> list[str]:
    return [key for key, urls in deaths.items() if len(urls) > 1]


def _facts_of_all(engines: Sequence[ServerEngine]) -> EngineFacts:
    first = engines[0].facts
    command = first.command
    for engine in engines[1:]:
        for (what, ours), other in zip(_compared(first).items(), _compared(engine.facts).values(), strict=True):
            if ours != other:
                raise UnlikeServersError(what, (engines[0].server.url, ours), (engine.server.url, other))
        command = (*command, BETWEEN_COMMANDS, *engine.facts.command)
    return replace(first, command=command if any(part != BETWEEN_COMMANDS for part in command) else ())


def _compared(facts: EngineFacts) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items()))
    return {"device": facts.device, "versions": versions}
