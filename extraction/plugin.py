"""The guest inside SGLang: hooks itself in when the model is loaded, hands states to the ring, changes nothing.

    register()                         entry point of the group `sglang.srt.plugins`; inert without SGLANG_HS_DUMP_DIR
    ModelRunner.load_model, after      sets `layers_to_capture` on the text backbone, adds a forward hook to it
    ForwardBatch.init_new, after       notes the prompt lengths of our requests
    ModelRunner.forward, before/after  names the batch that is about to run; sees that its rows were taken
    the backbone's forward hook        takes (hidden, aux), hands `hidden` on as if nothing had been asked

No hook may raise: a fault stops capture, is written to capture.json (schemas/dump.py) and the server goes on.
PATCHES.md says what holds this together. Standard library, torch and `schemas` only, SGLang inside functions.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .. import __version__
from ..schemas.dump import CaptureStatus
from ..schemas.errors import EaglehsError
from ..schemas.states import check_layers, state_names
from .capture import PROMPT_TOKENS, Capture, prompt_lengths
from .capture_settings import DUMP_DIR, CaptureSettings
from .capture_status import READY, StatusFile, forget_earlier_status
from .ring import MAX_SLOT_ROWS, DumpRing, Piece, RingShape
from .sglang_view import (
    CaptureRefusedError,
    ModelShape,
    capture_layers,
    find_backbone,
    model_shape,
    refused_settings,
    resolved_settings,
    rows_in_a_batch,
    sglang_version,
    tensor_parallel_rank,
)
from .sink import write_dump

P = ParamSpec("P")

logger = logging.getLogger(__name__)

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"

DRAIN_TIMEOUT_S = 60.0


class Guest:
    """What the plugin holds in one SGLang process."""

    def __init__(self, settings: CaptureSettings) -> None:
        """Nothing is touched before the model is loaded."""
        self.settings = settings
        self.status = StatusFile(settings.dump_dir, _status(settings, None))
        self.capture: Capture | None = None

    def fail(self, fault: Exception) -> None:
        """Stop capture for good and tell the client why."""
        if self.capture is not None:
            self.capture.stop()
        message = str(fault) if isinstance(fault, EaglehsError) else f"{type(fault).__name__}: {fault}"
        if not isinstance(fault, EaglehsError):
            logger.error("A fault in eaglehs itself", exc_info=fault)
        self.status.say_failed(message)

    def guarded(self, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run one step of ours; whatever it raises stops capture and not the server."""
        try:
            step(*args, **kwargs)
        except Exception as fault:  # noqa: BLE001 - the border: a guest must not bring down its host
            self.fail(fault)

    def after_load_model(self, _result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Hook in; of the target model only, not of a drafter."""
        if not getattr(runner, "is_draft_worker", False):
            self.guarded(self.hook_in, runner)

    def hook_in(self, runner: Any) -> None:
        """Check the server and the model, allocate the ring and start to capture.

        Raises:
            CaptureRefusedError, UsageError: what was asked for can't be captured right.
        """
        if self.capture is not None:
            raise CaptureRefusedError("this server process loaded a second model")
        shape = model_shape(runner)
        self.status = StatusFile(self.settings.dump_dir, _status(self.settings, shape))
        in_force = resolved_settings(runner.server_args)
        for violation in refused_settings(in_force):
            raise CaptureRefusedError(
                f"{violation.found}: {violation.rule.name}", why=violation.rule.why, mend=violation.rule.mend
            )
        layers = check_layers(self.settings.layers, shape.num_layers)
        if shape.dtype != "bfloat16":
            raise CaptureRefusedError(f"the model is loaded as {shape.dtype}, and dumps hold bfloat16")
        backbone = find_backbone(runner.model)
        # Ranks share the collectives that gather the states: all set the list and hook in, one writes.
        is_writer = tensor_parallel_rank(runner) == 0
        put = self._make_ring(shape, rows_in_a_batch(in_force), runner.device).put if is_writer else None
        self.capture = Capture(
            rid_prefix=self.settings.rid_prefix, layers=layers, hidden_size=shape.hidden_size, put=put
        )
        capture_layers(backbone, layers)
        backbone.register_forward_hook(self.in_backbone, with_kwargs=True)
        if is_writer:
            self.status.say_ready()
            logger.info("Capturing layers %s of %s into %s", layers, shape.model_class, self.settings.dump_dir)

    def after_init_batch(self, result: Any, _cls: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """Note the prompt lengths where requests are still at hand."""
        if self.capture is not None:
            self.guarded(lambda: setattr(result, PROMPT_TOKENS, prompt_lengths(batch.reqs, self.settings.rid_prefix)))

    def before_forward(self, _runner: Any, forward_batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """Announce the batch."""
        if self.capture is not None:
            self.guarded(self.capture.before_forward, forward_batch)

    def after_forward(self, *_args: Any, **_kwargs: Any) -> None:
        """See that nothing announced was missed."""
        if self.capture is not None:
            self.guarded(self.capture.after_forward)

    def in_backbone(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take the states off the backbone's output; SGLang gets what it would have got without the list."""
        if not (isinstance(output, tuple) and len(output) == 2):
            return None
        hidden, aux = output
        if self.capture is not None:
            self.guarded(self.capture.take, hidden, aux, (*args, *kwargs.values()))
        return hidden

    def _make_ring(self, shape: ModelShape, batch_rows: int | None, device: str) -> DumpRing:
        ring = DumpRing(
            RingShape(
                slots=self.settings.slots,
                slot_rows=min(batch_rows or MAX_SLOT_ROWS, MAX_SLOT_ROWS),
                num_states=len(state_names(self.settings.layers)),
                hidden_size=shape.hidden_size,
                writers=self.settings.writers,
            ),
            device=torch.device(device),
            write=_writer(self.settings),
            report=self.fail,
        )
        atexit.register(ring.drain, DRAIN_TIMEOUT_S)  # the writers are daemons: a clean stop must not cut them off
        return ring


_guest: Guest | None = None


def register() -> None:
    """Ask SGLang to call us; does nothing unless a dump folder is set, and nothing the second time."""
    global _guest  # noqa: PLW0603 - one a process, because SGLang's hooks are
    if not os.environ.get(DUMP_DIR) or _guest is not None:
        return
    if multiprocessing.parent_process() is None:  # the server's first process; those that load the model come later
        forget_earlier_status(Path(os.environ[DUMP_DIR]))
    try:
        settings = CaptureSettings.from_environment(os.environ)
    except EaglehsError as fault:
        _refuse_settings(Path(os.environ[DUMP_DIR]), fault)
        return
    assert settings is not None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _guest = Guest(settings)
    HookRegistry.register(f"{RUNNER}.load_model", _guest.after_load_model, HookType.AFTER)
    HookRegistry.register(f"{RUNNER}.forward", _guest.before_forward, HookType.BEFORE)
    HookRegistry.register(f"{RUNNER}.forward", _guest.after_forward, HookType.AFTER)
    HookRegistry.register(f"{BATCH}.init_new", _guest.after_init_batch, HookType.AFTER)


def _refuse_settings(folder: Path, fault: EaglehsError) -> None:
    # SGLang swallows what `register` raises; the client would wait for a server that captures nothing.
    nothing = CaptureSettings(dump_dir=folder, layers=())
    StatusFile(folder, _status(nothing, None)).say_failed(str(fault))


def _status(settings: CaptureSettings, shape: ModelShape | None) -> CaptureStatus:
    return CaptureStatus(
        state=READY,
        message="",
        pid=os.getpid(),
        model_class=shape.model_class if shape else "",
        layers=settings.layers,
        num_layers=shape.num_layers if shape else 0,
        hidden_size=shape.hidden_size if shape else 0,
        dtype=shape.dtype if shape else "",
        rid_prefix=settings.rid_prefix,
        engine_version=sglang_version(),
        plugin_version=__version__,
    )


def _writer(settings: CaptureSettings) -> Callable[[Piece, Tensor, Sequence[Tensor]], Path]:
    names = state_names(settings.layers)

    def write(piece: Piece, ids_T: Tensor, states_TH: Sequence[Tensor]) -> Path:
        return write_dump(
            settings.dump_dir,
            piece.name,
            layers=settings.layers,
            prompt_tokens=piece.prompt_tokens,
            input_ids=ids_T,
            states=dict(zip(names, states_TH, strict=True)),
        )

    return write
