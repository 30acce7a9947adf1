"""Samples of different lengths to one batch: ids, mask and states are padded and cut together.

Shape legend: B samples, T tokens of the longest, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from ..schemas.states import INPUT_IDS
from .decode import DecodedSample, decode, is_decoded
from .stream import HiddenStateStream

_PADDED_DTYPES = {INPUT_IDS: torch.int64}
"""Dtypes that differ from the sample's: embeddings take int64 ids. All else keeps its own, bfloat16 above all."""


class BatchError(DataError):
    """Samples that can't stand in one batch."""


def collate(samples: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> dict[str, Any]:
    """Return a batch of `samples`, which `decode`, `eaglehs.stream` or a stock reader gave; fits `DataLoader`.

    Keys are those of the samples, with a batch dimension:

        key                 list of B str
        input_ids           int64 [B, T], 0 on padding
        loss_mask           uint8 [B, T], 0 on padding: a padded token is never trained on
        layer_<k>, final    bfloat16 [B, T, H], 0 on padding
        attention_mask      int64 [B, T], 1 = a token, 0 = padding
        lengths             int64 [B], tokens of each sample after the cut

    Samples longer than `max_tokens` lose their tail, in all arrays alike. The tensors are new memory.

    Raises:
        BatchError: no samples, or samples of different arrays, widths or dtypes.
        UsageError: `max_tokens` is less than 1.
        ColumnError: a row of a stock reader can't be decoded.
    """
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}", mend="Give at least 1, or None for no limit")
    decoded = [dict(sample) if is_decoded(sample) else decode(sample) for sample in samples]
    if not decoded:
        raise BatchError("a batch of no samples")
    names = [name for name in decoded[0] if isinstance(decoded[0][name], torch.Tensor)]
    _check_alike(decoded, names)
    lengths = [min(len(sample[names[0]]), max_tokens or len(sample[names[0]])) for sample in decoded]
    batch: dict[str, Any] = {"key": [sample.get("key", "") for sample in decoded]}
    batch |= {name: _padded([sample[name] for sample in decoded], lengths, name) for name in names}
    batch["attention_mask"] = _mask(lengths)
    batch["lengths"] = torch.tensor(lengths, dtype=torch.int64)
    _tell_stream()
    return batch


def _tell_stream() -> None:
    """Let the stream that this DataLoader worker reads know of a batch: it can't resume by a count of other ones."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, HiddenStateStream):
        info.dataset.note_batch()


def _padded(tensors: Sequence[torch.Tensor], lengths: Sequence[int], name: str) -> torch.Tensor:
    first = tensors[0]
    shape = (len(tensors), max(lengths), *first.shape[1:])
    padded = torch.zeros(shape, dtype=_PADDED_DTYPES.get(name, first.dtype))
    for row, tensor, length in zip(padded, tensors, lengths, strict=True):
        row[:length] = tensor[:length]
    return padded


def _mask(lengths: Sequence[int]) -> torch.Tensor:
    positions_T = torch.arange(max(lengths))
    return (positions_T < torch.tensor(lengths)[:, None]).to(torch.int64)


def _check_alike(samples: Sequence[DecodedSample], names: Sequence[str]) -> None:
    first = samples[0]
    for sample in samples:
        found = [name for name in sample if isinstance(sample[name], torch.Tensor)]
        if sorted(found) != sorted(names):
            raise BatchError(
                f"samples {_name(first)} and {_name(sample)} have different arrays: {names} and {found}",
                why="They are of different datasets, or of streams with different states",
            )
        for name in names:
            _check_array(name, sample, first, T=len(sample[names[0]]))


def _check_array(name: str, sample: DecodedSample, first: DecodedSample, *, T: int) -> None:
    here, there = sample[name], first[name]
    if here.shape[1:] != there.shape[1:] or here.dtype != there.dtype:
        raise BatchError(
            f"{name} of sample {_name(sample)} is {here.dtype} {list(here.shape)}, "
            f"of sample {_name(first)} {there.dtype} {list(there.shape)}",
            why="They are of different datasets",
        )
    if len(here) != T:
        raise BatchError(
            f"{name} of sample {_name(sample)} has {counted(len(here), 'row')}, other arrays of it {T:,}",
            why="Rows of one sample belong together; something cut one array without the others",
        )


def _name(sample: DecodedSample) -> str:
    return repr(sample.get("key", ""))
