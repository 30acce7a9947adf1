"""Dump: one `.pt` file that the engine wrote for one prefill chunk of one request. Format version 1.

`torch.save` of a dict of plain types and CPU tensors, readable with `weights_only=True` and `mmap=True`:

    kind           "eaglehs.dump"
    version        1
    rid            str: `eh-<run>-<key>-<attempt>`, the request's id at the server
    start, end     int: the rows are positions start..end-1 of the request; n = end - start
    prompt_tokens  int or None: tokens of the whole request, where the engine knows it
    capture        "layer_input": see schemas/states.py, "Hook point"
    layers         list of int, ascending
    input_ids      int32 [n]
    layer_<k>      bfloat16 [n, H], one a layer
    final          bfloat16 [n, H]

Each tensor owns its storage: a saved view drags its whole base along. The file is called
`<rid>.<start:06d>-<end:06d>.pt`, written as a hidden sibling and then renamed.

Version history: 1, the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from .errors import DataError
from .keys import is_key

DUMP_KIND = "eaglehs.dump"
DUMP_VERSION = 1

_RUN = re.compile(r"[a-z0-9]{1,16}")
_RID = re.compile(r"eh-([a-z0-9]{1,16})-([a-z0-9][a-z0-9_-]*)-([0-9]{1,6})")
_NAME = re.compile(r"(eh-[a-z0-9_-]+)\.([0-9]{6,})-([0-9]{6,})\.pt")


class DumpNameError(DataError):
    """A request id or file name does not have the form of a dump's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestId:
    """The id of one request: which run, which sample, which attempt. A new attempt never mixes with an earlier one."""

    run: str
    key: str
    attempt: int

    def __post_init__(self) -> None:
        """Refuse parts that would not come back from the text."""
        if _RUN.fullmatch(self.run) is None or not is_key(self.key) or not 0 <= self.attempt < 1_000_000:
            raise DumpNameError(
                f"no request id can be made of run {self.run!r}, key {self.key!r}, attempt {self.attempt}"
            )

    def __str__(self) -> str:
        """Return `eh-<run>-<key>-<attempt>`."""
        return f"eh-{self.run}-{self.key}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> RequestId:
        """Return the parts of a request id.

        Raises:
            DumpNameError: `text` is no request id of eaglehs.
        """
        match = _RID.fullmatch(text)
        if match is None or not is_key(match[2]):
            raise DumpNameError(f"{text[:80]!r} is not a request id of eaglehs (eh-<run>-<key>-<attempt>)")
        return cls(run=match[1], key=match[2], attempt=int(match[3]))


def rid_prefix(run: str) -> str:
    """Return what every request id of the run `run` starts with."""
    return f"eh-{run}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpName:
    """What a dump's file name says: the request and the rows."""

    rid: str
    start: int
    end: int

    @property
    def filename(self) -> str:
        """The file's name, without folder."""
        return f"{self.rid}.{self.start:06d}-{self.end:06d}.pt"

    @property
    def num_rows(self) -> int:
        """Rows (tokens) in the file."""
        return self.end - self.start

    @classmethod
    def parse(cls, filename: str) -> DumpName:
        """Return the parts of a dump's file name.

        Raises:
            DumpNameError: the name is not a dump's, or its range is empty.
        """
        match = _NAME.fullmatch(filename)
        if match is None or int(match[2]) >= int(match[3]):
            raise DumpNameError(f"{filename[:120]!r} is not the name of a dump (<rid>.<start>-<end>.pt)")
        return cls(rid=match[1], start=int(match[2]), end=int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatus:
    """`capture.json` in the dump folder: the plugin says that it is hooked in, or why capture has stopped.

    The plugin writes it when the model is loaded and again when capture fails. The client reads it before its first
    prompt and whenever dumps stay away. A failed capture leaves the server serving.
    """

    KIND: ClassVar[str] = "eaglehs.capture"
    VERSION: ClassVar[int] = 1
    FILENAME: ClassVar[str] = "capture.json"

    state: str
    """`ready` or `failed`."""

    message: str
    """Why it failed; empty when ready."""

    pid: int
    model_class: str
    layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: str
    rid_prefix: str
    engine_version: str
    """The SGLang version that the plugin found itself in."""

    plugin_version: str
