"""What the plugin is told: five environment variables, read in this one place.

    SGLANG_HS_DUMP_DIR     folder for dumps; the plugin does nothing unless it is set
    SGLANG_HS_LAYERS       the states to capture, such as 3,31,59 (schemas/states.py, "Hook point")
    SGLANG_HS_RID_PREFIX   only requests whose id starts so are dumped; default eh-
    SGLANG_HS_WRITERS      threads that write files; default 6
    SGLANG_HS_SLOTS        chunks that wait for the writers in host memory; default 6

The environment, because SGLang's own processes are started by SGLang: nothing else reaches the one with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..schemas.errors import UsageError

DUMP_DIR = "SGLANG_HS_DUMP_DIR"
LAYERS = "SGLANG_HS_LAYERS"
RID_PREFIX = "SGLANG_HS_RID_PREFIX"
WRITERS = "SGLANG_HS_WRITERS"
SLOTS = "SGLANG_HS_SLOTS"

DEFAULT_RID_PREFIX = "eh-"
DEFAULT_WRITERS = 6
DEFAULT_SLOTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """What to capture, of which requests, and where to put it."""

    dump_dir: Path
    layers: tuple[int, ...]
    """Ascending; checked against the model when it is loaded."""

    rid_prefix: str = DEFAULT_RID_PREFIX
    writers: int = DEFAULT_WRITERS
    slots: int = DEFAULT_SLOTS

    def to_environment(self) -> dict[str, str]:
        """Return the variables that give a server these settings; of writers and slots only what is not the default."""
        variables = {
            DUMP_DIR: str(self.dump_dir),
            LAYERS: ",".join(map(str, self.layers)),
            RID_PREFIX: self.rid_prefix,
        }
        counts = ((WRITERS, self.writers, DEFAULT_WRITERS), (SLOTS, self.slots, DEFAULT_SLOTS))
        return variables | {name: str(count) for name, count, default in counts if count != default}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> CaptureSettings | None:
        """Return the settings, or None where no dump folder is set and the plugin must stay out of the way.

        Raises:
            UsageError: a variable is missing or can't be read as what it should be.
        """
        folder = environment.get(DUMP_DIR, "")
        if not folder:
            return None
        return cls(
            dump_dir=Path(folder),
            layers=_layers(environment.get(LAYERS, "")),
            rid_prefix=_prefix(environment.get(RID_PREFIX, DEFAULT_RID_PREFIX)),
            writers=_count(environment, WRITERS, DEFAULT_WRITERS),
            slots=_count(environment, SLOTS, DEFAULT_SLOTS),
        )


def _layers(text: str) -> tuple[int, ...]:
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{LAYERS} is {text!r}", mend="Set it to layer numbers such as 3,31,59") from None
    return tuple(sorted(layers))


def _prefix(text: str) -> str:
    # A prefix that no request id of eaglehs can have would mean a server that captures nothing and does not say so.
    if not text.startswith(DEFAULT_RID_PREFIX):
        raise UsageError(f"{RID_PREFIX} is {text!r}", mend=f"Set it to {DEFAULT_RID_PREFIX} or to a run's eh-<run>-")
    return text


def _count(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} is {text!r}", mend=f"Set it to a number above zero, such as {default}")
    return int(text)
