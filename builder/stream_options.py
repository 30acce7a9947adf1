"""What a stream gives out and how it reads, checked once when it is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
import torch.distributed

from ..schemas.errors import UsageError
from ..schemas.sizes import parse_size
from ..schemas.states import Codec
from .sample_order import Ranks

Staging = Literal["auto", "map", "arena", "pinned"]
"""Where samples lie.

`map`: in the page cache, seen through the mapped file: no copy; of local datasets whose states are plain. `arena`: read
into memory that is used again and again. `pinned`: the same from torch's page-locked memory, from which a GPU copies by
itself. `auto`: `pinned` where `device` is a GPU, else `map` where that can be, else `arena`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which samples come, in which order, and what of each."""

    arrays: tuple[str, ...]
    max_tokens: int | None
    shuffle_seed: int | None
    ranks: Ranks
    batch_size: int | None
    """Samples that a DataLoader takes from one worker before it asks the next; None: nobody has said."""

    @property
    def worker_batch(self) -> int:
        """Samples that a worker reads in one go."""
        return self.batch_size or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetKind:
    """What of a dataset decides how it can be read."""

    is_remote: bool
    codec: Codec = Codec.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How samples are brought in."""

    staging: Staging
    prefetch_bytes: int
    verify: bool
    device: torch.device | None


def check_numbers(**numbers: tuple[int | None, int]) -> None:
    """Refuse what is no whole number, or below the least that it may be: name=(value, least).

    Raises:
        UsageError: names the first.
    """
    for name, (value, least) in numbers.items():
        if value is not None and not _is_whole(value):
            raise UsageError(f"{name} is {value!r}, not a whole number", mend=f"Give {least} or more")
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}", mend=f"Give {least} or more")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def choose_ranks(rank: int | None, world_size: int | None, remainder: str) -> Ranks:
    """Return whose part is read: as given, else by torch.distributed, else by RANK and WORLD_SIZE, else all.

    Raises:
        UsageError: one is given without the other, or they or the remainder can't be.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank is {rank} and world_size {world_size}", mend="Give both or none")
    if rank is None or world_size is None:
        rank, world_size = _world_around()
    check_numbers(rank=(rank, 0), world_size=(world_size, 1))
    if rank >= world_size:
        raise UsageError(f"rank {rank} is not one of {world_size}, which are 0..{world_size - 1}")
    if remainder not in ("keep", "drop", "repeat"):
        raise UsageError(f"remainder is {remainder!r}", mend="Give 'keep', 'drop' or 'repeat'")
    return Ranks(rank=rank, world_size=world_size, remainder=remainder)  # type: ignore[arg-type]  # just compared


def choose_reading(
    staging: str, prefetch_bytes: int | str, *, verify: bool | None, device: object, kind: DatasetKind
) -> Reading:
    """Return how samples are brought in.

    Raises:
        UsageError: a mode or size that can't be; mapping what is remote or coded; pinned memory without a GPU.
    """
    if staging not in ("auto", "map", "arena", "pinned"):
        raise UsageError(f"staging is {staging!r}", mend="Give 'auto', 'map', 'arena' or 'pinned'")
    target = None if device is None else torch.device(device)  # type: ignore[call-overload]  # torch checks it
    if staging == "map" and kind.is_remote:
        raise UsageError("a remote dataset can't be mapped", mend="Leave staging out")
    if staging == "map" and kind.codec is not Codec.PLAIN:
        raise UsageError(f"states of codec {kind.codec} are decoded, and so can't be mapped", mend="Leave staging out")
    if staging == "pinned" and not torch.cuda.is_available():
        raise UsageError("staging='pinned' needs a GPU, and torch sees none", mend="Leave staging out")
    if staging == "auto":
        plain = "arena" if kind.is_remote or kind.codec is not Codec.PLAIN else "map"
        staging = "pinned" if target is not None and target.type == "cuda" else plain
    size = parse_size(prefetch_bytes) if isinstance(prefetch_bytes, str) else prefetch_bytes
    check_numbers(prefetch_bytes=(size, 1))
    return Reading(
        staging=staging,  # type: ignore[arg-type]  # just compared
        prefetch_bytes=size,
        verify=kind.is_remote if verify is None else verify,
        device=target,
    )


def _world_around() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if all(text.isdecimal() for text in found):
        return int(found[0]), int(found[1])
    return 0, 1
