"""Samples on a GPU, copied on a stream of their own while the loop computes on the sample before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from .decode import DecodedSample


def on_device(samples: Iterable[DecodedSample], device: torch.device) -> Iterator[DecodedSample]:
    """Yield `samples` with their tensors on `device`; to a GPU one sample ahead of the loop.

    The loop's own stream waits for the copy, not the loop. A sample's memory on the GPU is freed, and its pinned memory
    read into again, only when work on it that was queued has been done: torch keeps track of both.
    """
    if device.type != "cuda":
        for sample in samples:
            yield {name: _moved(value, device) for name, value in sample.items()}
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has not typed it
    ahead: tuple[DecodedSample, torch.cuda.Event] | None = None
    for sample in samples:
        with torch.cuda.stream(copies):
            moved = {name: _moved(value, device) for name, value in sample.items()}
            copied = copies.record_event()
        del sample
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = (moved, copied)
    if ahead is not None:
        yield _arrived(*ahead, device)


def _moved(value: object, device: torch.device) -> object:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _arrived(sample: DecodedSample, copied: torch.cuda.Event, device: torch.device) -> DecodedSample:
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for value in sample.values():
        if isinstance(value, torch.Tensor):
            value.record_stream(current)  # it was made on the other stream, and is used on this one
    return sample
