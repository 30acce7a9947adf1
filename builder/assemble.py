"""Dumps of one prompt to a checked sample: all its rows, only its rows, in order, of the right tokens, plausible.

    read_dump       each file is a dump of this prompt and layout             builder/dump_reader
    _in_row_order   chunks cover 0..T without gap or overlap
    _scan           one pass: file hash, ids equal, checks of each state      builder/file_scan, state_check
    _judge          the first fault of any state, or two states alike

T tokens. What is refused here, at the writer's border, `verify` refuses at the reader's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ..schemas.counts import counted
from ..schemas.errors import DataError
from ..schemas.prompt import Prompt
from ..schemas.sample import CheckedSample, DumpRef
from ..schemas.states import INPUT_IDS, LOSS_MASK, ArraySpec
from .dump_reader import Dump, read_dump
from .dump_zip import DumpUnreadableError
from .file_scan import Region, scan_file
from .plan import DatasetLayout
from .state_check import StateCheck

IdsT = npt.NDArray[np.int32]


class SampleError(DataError):
    """The dumps of a prompt do not make a sample; `key` is the prompt's."""

    def __init__(self, key: str, what: str, *, why: str = "", mend: str = "") -> None:
        """The message begins with the key."""
        self.key = key
        super().__init__(f"{key}: {what}", why=why, mend=mend)


class RowCoverageError(SampleError):
    """Rows are missing, doubled or too many."""


class ForeignDumpError(SampleError):
    """A dump belongs to another prompt or attempt."""


class TokenIdsError(SampleError):
    """The dumps' token ids are not the prompt's."""


class BadStatesError(SampleError):
    """States that no model computed: NaN, infinite, zero, constant, repeated rows, or two states alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedSample:
    """A checked sample, and what is needed to write it to a shard."""

    checked: CheckedSample
    dumps: tuple[Dump, ...]
    """In row order."""


def check_dumps(prompt: Prompt, dumps: Sequence[Path], layout: DatasetLayout) -> CheckedSample:
    """Return the sample that `dumps` (in any order) make, or raise what is wrong with them.

    Raises:
        DumpError: a file can't be read as a dump of this layout.
        SampleError: rows, token ids or values are not the prompt's; see its subclasses.
    """
    return examine(prompt, dumps, layout).checked


def examine(prompt: Prompt, dumps: Sequence[Path], layout: DatasetLayout) -> ExaminedSample:
    """Check as `check_dumps` does, and return also where the arrays lie and their hashes. Reads each byte once."""
    ids_T = np.ascontiguousarray(prompt.input_ids, dtype="<i4")
    mask_T = np.ascontiguousarray(prompt.loss_mask, dtype="|u1")
    ordered = _in_row_order(prompt, [read_dump(path, layout) for path in dumps])
    checks = {spec.name: StateCheck(spec.name, ids_T) for spec in layout.specs if spec.is_state}
    refs = tuple(_scan(prompt.key, dump, ids_T, layout, checks) for dump in ordered)
    _judge(prompt.key, checks)
    hashes = {INPUT_IDS: _digest(ids_T), LOSS_MASK: _digest(mask_T)}
    checked = CheckedSample(
        key=prompt.key,
        num_tokens=len(ids_T),
        dumps=refs,
        state_norms={name: check.mean_norm for name, check in checks.items()},
        xxh3_128={**hashes, **{name: check.xxh3_128 for name, check in checks.items()}},
    )
    return ExaminedSample(checked=checked, dumps=tuple(ordered))


def _in_row_order(prompt: Prompt, dumps: Iterable[Dump]) -> list[Dump]:
    ordered = sorted(dumps, key=lambda dump: (dump.name.start, dump.name.end))
    end = 0
    for dump in ordered:
        _check_owner(prompt, dump, ordered[0])
        if dump.name.start > end:
            raise _missing_rows(prompt, end, dump.name.start)
        if dump.name.start < end:
            raise RowCoverageError(
                prompt.key,
                f"rows {dump.name.start}..{min(end, dump.name.end) - 1} are in two dumps; the second is {dump.path}",
                why="Chunks of two requests were mixed",
                mend="Remove the sample's dumps and run `eaglehs extract` again",
            )
        end = dump.name.end
    if end < prompt.num_tokens:
        raise _missing_rows(prompt, end, prompt.num_tokens)
    if end > prompt.num_tokens:
        raise RowCoverageError(
            prompt.key,
            f"{counted(end, 'state row')} for {counted(prompt.num_tokens, 'token id')}",
            why="Generated or padding rows were kept",
            mend="Extract with max_new_tokens 1 and the plugin of this eaglehs",
        )
    return ordered


def _check_owner(prompt: Prompt, dump: Dump, first: Dump) -> None:
    if dump.request.key != prompt.key:
        raise ForeignDumpError(prompt.key, f"{dump.path} is a dump of sample {dump.request.key}")
    if dump.request != first.request:
        raise ForeignDumpError(prompt.key, f"{dump.path} is of another request than {first.path.name}")
    if dump.prompt_tokens not in {None, prompt.num_tokens}:
        raise RowCoverageError(
            prompt.key,
            f"{dump.path} is of a request of {counted(dump.prompt_tokens, 'token')}, "
            f"the prompt has {prompt.num_tokens:,}",
        )


def _missing_rows(prompt: Prompt, start: int, end: int) -> RowCoverageError:
    what = f"rows {start}..{end - 1} of {prompt.num_tokens} are missing"
    if start == 0 and end < prompt.num_tokens:
        return RowCoverageError(
            prompt.key,
            what,
            why="The engine took them from its prefix cache and never computed them",
            mend="Restart the server with --disable-radix-cache",
        )
    return RowCoverageError(
        prompt.key,
        what,
        why="A prefill chunk of the request was never dumped (--chunked-prefill-size sets their size)",
        mend="Run `eaglehs extract` again: the sample is computed anew",
    )


def _scan(key: str, dump: Dump, ids_T: IdsT, layout: DatasetLayout, checks: dict[str, StateCheck]) -> DumpRef:
    """Read one dump once: its hash, its ids against the prompt's, its states into their checks."""
    digest = xxhash.xxh3_128()
    ids = bytearray()
    regions = []
    for spec in layout.specs:
        if spec.name in dump.arrays:
            take = partial(_take_rows, checks[spec.name], spec) if spec.is_state else ids.extend
            place = dump.arrays[spec.name]
            regions.append(Region(offset=place.offset, length=place.length, row_bytes=spec.row_bytes, take=take))
    regions.sort(key=lambda region: region.offset)
    try:
        with dump.path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            scan_file(dump.path, file.fileno(), size_bytes, regions, digest.update)
    except OSError as fault:
        raise DumpUnreadableError(dump.path, f"can't be read: {fault.strerror or fault}") from None
    _check_ids(key, dump, np.frombuffer(ids, dtype="<i4"), ids_T)
    return DumpRef(name=dump.path.name, size_bytes=size_bytes, xxh3_128=digest.hexdigest())


def _take_rows(check: StateCheck, spec: ArraySpec, block: memoryview) -> None:
    check.update(np.frombuffer(block, dtype="<u2").reshape(-1, spec.width))


def _check_ids(key: str, dump: Dump, found_N: IdsT, ids_T: IdsT) -> None:
    wanted_N = ids_T[dump.name.start : dump.name.end]
    differs = np.flatnonzero(found_N != wanted_N)
    if len(differs):
        first = int(differs[0])
        raise TokenIdsError(
            key,
            f"token {dump.name.start + first} is {found_N[first]} in {dump.path.name}, {wanted_N[first]} in the prompt "
            f"({len(differs)} of {len(found_N)} differ)",
            why="The states belong to another prompt, or the engine changed its tokens",
            mend="Remove the sample's dumps and run `eaglehs extract` again",
        )


def _judge(key: str, checks: dict[str, StateCheck]) -> None:
    seen: dict[str, str] = {}
    for name, check in checks.items():
        for fault in check.faults():
            raise BadStatesError(
                key,
                fault.message,
                why="The states are not what the model computed",
                mend="Extract this sample again; if it stays so, check the engine's precision and parallel settings",
            )
        if check.xxh3_128 in seen:
            raise BadStatesError(
                key,
                f"{seen[check.xxh3_128]} and {name} are identical",
                why="One buffer was captured for two layers",
                mend="Check that the engine's version is a supported one (`eaglehs doctor`)",
            )
        seen[check.xxh3_128] = name


def _digest(array: IdsT | npt.NDArray[np.uint8]) -> str:
    return str(xxhash.xxh3_128_hexdigest(array.data))
