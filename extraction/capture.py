"""Which rows of which batch: from the model's forward pass to pieces for the ring.

SGLang prefills in batches. One batch holds chunks of several requests, one behind the other, also of requests that
are not ours (health checks, warm-up, other clients), and with mixed chunks also decode steps, which look like chunks
of one row. Only rows of our requests at positions below their prompt's length are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..schemas.counts import counted
from ..schemas.dump import DumpName, DumpNameError, RequestId
from .ring import Piece
from .sglang_view import CAPTURED_MODES, CaptureRefusedError

logger = logging.getLogger(__name__)

PROMPT_TOKENS = "eaglehs_prompt_tokens"
"""Attribute that the plugin puts on SGLang's ForwardBatch: request id -> tokens of its prompt."""

Put = Callable[[Sequence[Piece], Sequence[Tensor], Tensor], object]
"""Takes the pieces of a batch out of its states [>= T, H] and ids [>= T]; `DumpRing.put`."""


class Batch(Protocol):
    """The part of SGLang's ForwardBatch that is read here."""

    forward_mode: Any
    rids: Sequence[str] | None
    input_ids: Tensor
    extend_seq_lens_cpu: Sequence[int] | None
    extend_prefix_lens_cpu: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class _Expected:
    """A batch with rows of ours, between the start of its forward pass and the hook in it."""

    batch: Batch
    pieces: tuple[Piece, ...]
    num_rows: int


class Capture:
    """Cuts the rows out of each batch. One a process; SGLang runs one forward pass at a time."""

    def __init__(self, *, rid_prefix: str, layers: Sequence[int], hidden_size: int, put: Put | None) -> None:
        """`put` is None on ranks that do not write: they only hand `hidden` on, as the first rank does."""
        self._rid_prefix = rid_prefix
        self._num_layers = len(layers)
        self._hidden_size = hidden_size
        self._put = put
        self._expected: _Expected | None = None

    def stop(self) -> None:
        """Keep no more rows; the forward pass goes on as before."""
        self._put = None
        self._expected = None

    def before_forward(self, batch: Batch) -> None:
        """Find out whether the batch that is about to run holds rows of ours.

        Here and not in the model, because some runners hand the model a stand-in without request ids.

        Raises:
            CaptureRefusedError: rows can't be told apart.
        """
        self._expected = None
        if self._put is None or batch.forward_mode.name not in CAPTURED_MODES or not batch.rids:
            return
        pieces = tuple(pieces_of(batch, self._rid_prefix))
        if pieces:
            num_rows = sum(map(int, batch.extend_seq_lens_cpu or ()))
            self._expected = _Expected(batch, pieces, num_rows)

    def take(self, hidden_TH: Tensor, aux: Any, seen: Sequence[Any]) -> None:
        """Hand the rows of ours on; called in the model with its last norm's output and the states on the way.

        `aux` is a list of [T, H] or one packed [T, L * H]. `seen` are the arguments that the model was called with.

        Raises:
            CaptureRefusedError: the states are not those of the batch, or not as many, or not bfloat16.
        """
        expected, self._expected, put = self._expected, None, self._put
        if expected is None or put is None:  # a writer thread may call `stop` at any moment
            return
        if not any(getattr(item, "rids", None) == expected.batch.rids for item in seen):
            raise CaptureRefusedError(
                "the model was run on a stand-in batch, as CUDA graphs for prefill do",
                mend="Start the server with --cuda-graph-backend-prefill disabled",
            )
        states = [*self._split(aux), hidden_TH]
        for state in states:
            self._check(state, expected.num_rows)
        put(expected.pieces, states, expected.batch.input_ids)

    def after_forward(self) -> None:
        """See that the rows announced before this forward pass were taken in it.

        Raises:
            CaptureRefusedError: the model's hook never ran, so that rows of ours are lost.
        """
        expected, self._expected = self._expected, None
        if expected is not None:
            raise CaptureRefusedError(
                f"a batch with {expected.pieces[0].name.rid} ran without passing the capture point",
                why="The model's layers were run some other way, as a replayed CUDA graph is",
                mend="Start the server with CUDA graphs off for prefill",
            )

    def _split(self, aux: Any) -> list[Tensor]:
        if isinstance(aux, Tensor):
            if aux.shape[-1] != self._num_layers * self._hidden_size:
                raise CaptureRefusedError(
                    f"packed states are {aux.shape[-1]} wide, expected {self._num_layers} x {self._hidden_size}"
                )
            return list(aux.chunk(self._num_layers, dim=-1))
        if not isinstance(aux, list | tuple) or len(aux) != self._num_layers:
            found = counted(len(aux), "state") if isinstance(aux, list | tuple) else f"a {type(aux).__name__}"
            raise CaptureRefusedError(f"the model gave {found} for {counted(self._num_layers, 'layer')}")
        return list(aux)

    def _check(self, state: Tensor, num_rows: int) -> None:
        if state.dtype != torch.bfloat16:
            raise CaptureRefusedError(
                f"the model computes in {str(state.dtype).removeprefix('torch.')}, and dumps hold bfloat16",
                mend="Start the server with --dtype bfloat16",
            )
        if state.dim() != 2 or state.shape[0] < num_rows or state.shape[1] != self._hidden_size:
            raise CaptureRefusedError(
                f"a state is {list(state.shape)} for a batch of {counted(num_rows, 'row')} of width "
                f"{self._hidden_size}",
                why="Some kinds of parallelism leave each rank with a part of the rows",
                mend="Use --tp-size alone",
            )


def pieces_of(batch: Batch, rid_prefix: str) -> Iterator[Piece]:
    """Yield the prompt rows of our requests in a batch, in order.

    Raises:
        CaptureRefusedError: a batch holds decode rows, and a request's prompt length is not known.
    """
    prompt_tokens: Mapping[str, int] = getattr(batch, PROMPT_TOKENS, {})
    first = 0
    lengths = batch.extend_seq_lens_cpu or ()
    for rid, num_rows, start in zip(batch.rids or (), lengths, batch.extend_prefix_lens_cpu or (), strict=True):
        if rid.startswith(rid_prefix) and _is_safe(rid):
            known = prompt_tokens.get(rid)
            if known is None and batch.forward_mode.name == "MIXED":
                raise CaptureRefusedError(
                    f"{rid}: its prompt length is not known in a batch that mixes prefill and decode",
                    mend="Start the server without --enable-mixed-chunk",
                )
            end = int(start) + int(num_rows) if known is None else min(int(start) + int(num_rows), known)
            if end > int(start):
                yield Piece(name=DumpName(rid=rid, start=int(start), end=end), first=first, prompt_tokens=known)
        first += int(num_rows)


def prompt_lengths(requests: Sequence[Any] | None, rid_prefix: str) -> dict[str, int]:
    """Return the prompt lengths of our requests among SGLang's `Req` objects.

    `origin_input_ids` is the prompt as sent, whatever was generated since.
    """
    return {req.rid: len(req.origin_input_ids) for req in requests or () if req.rid.startswith(rid_prefix)}


def _is_safe(rid: str) -> bool:
    try:
        RequestId.parse(rid)
    except DumpNameError as fault:
        logger.warning("Nothing is captured of a request: %s", fault)
        return False
    return True
