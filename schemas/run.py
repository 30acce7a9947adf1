"""Run: `run/run.json`, one extraction and everything that its states depend on. Format versions 1 and 2.

run/run.json          this record, written before the first request and updated at the end
run/prompts.parquet   see schemas/prompt.py
run/ledger.jsonl      see schemas/ledger.py
run/dumps/ab/*.pt     dumps of finished samples, see schemas/dump.py; `ab` = schemas.keys.fan_out(key)
run/server.log        what the server printed

Version 2 has `packing.codec`; a run that is not packed at once, or plainly, is written as version 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .errors import UsageError
from .keys import fan_out
from .ledger import LEDGER_FILENAME
from .prompt import PROMPTS_FILENAME
from .sharding import Sharding
from .states import CAPTURE

RUN_FILENAME = "run.json"

LOCAL_REVISION = "local-"
"""Begins the revision of a model in a local folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a trainer must know of the target model; from its config.json."""

    name: str
    """Hub name or folder, as given."""

    revision: str
    """Commit of the Hub repository, or `local-<hash of config.json and the weights' names and sizes>`."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    """From the config, not the tokenizer: reserved slots count."""

    max_position: int
    """Longest sequence that the config allows, in tokens."""

    @property
    def hub_revision(self) -> str | None:
        """The commit on the Hub; None for a local folder."""
        return None if self.revision.startswith(LOCAL_REVISION) else self.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """What was made of the prompt files."""

    source: str
    fingerprint: str
    """xxh3_128 over all keys, ids, token ids and masks, in order."""

    num_prompts: int
    num_tokens: int
    num_trainable: int
    skipped: dict[str, int]
    """Reason -> rows of the prompt files that were left out."""

    tokenizer_hash: str
    """SHA-256 of the tokenizer's files; empty where ids were given."""

    template_hash: str
    """SHA-256 of the chat template; empty where none was used."""

    loss_mask: str
    """`assistant`, `last` or `all`; `given` where the rows brought masks."""

    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What computed the states."""

    name: str
    """`sglang` or `transformers`."""

    versions: dict[str, str]
    """Package -> version."""

    command: tuple[str, ...]
    """The server's command line; empty for the transformers engine."""

    environment: dict[str, str]
    """Variables set for the server; never a secret."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(Sharding):
    """Where and how a run that is extracted and packed in one step is packed; the same for all of its starts."""

    dataset: str
    """Absolute path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The contents of run.json."""

    KIND: ClassVar[str] = "eaglehs.run"
    VERSION: ClassVar[int] = 2
    OLDEST: ClassVar[int] = 1

    run_id: str
    """Eight hex digits; part of each request id."""

    created_at: str
    """UTC, ISO 8601."""

    eaglehs_version: str
    command: tuple[str, ...]
    model: ModelFacts
    layers: tuple[int, ...]
    prompts: PromptFacts
    engine: EngineFacts
    settings: dict[str, str]
    """Options that change no row: concurrency and the like."""

    starts: int = 0
    """How often the run was started: each start has request ids of its own, so that what an earlier, killed one left
    under way at a server is never taken for this one's."""

    packing: Packing | None = None
    """None: the dumps stay in the run, for `eaglehs pack`."""

    capture: str = CAPTURE
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run."""

    root: Path

    @property
    def record(self) -> Path:
        """run.json."""
        return self.root / RUN_FILENAME

    @property
    def prompts(self) -> Path:
        """prompts.parquet."""
        return self.root / PROMPTS_FILENAME

    @property
    def ledger(self) -> Path:
        """ledger.jsonl."""
        return self.root / LEDGER_FILENAME

    @property
    def server_log(self) -> Path:
        """server.log."""
        return self.root / "server.log"

    def dump_path(self, key: str, filename: str) -> Path:
        """Where a finished dump of the sample `key` lies."""
        return self.root / "dumps" / fan_out(key) / filename


def check_same_run(found: RunRecord, wanted: RunRecord, *, where: Path) -> None:
    """Refuse to go on with a run that was made of other inputs.

    Raises:
        UsageError: names the first field that differs, with both values.
    """
    for what, old, new in _identity(found, wanted):
        if old != new:
            raise UsageError(
                f"{where} was made with another {what}: {old} there, {new} now",
                why="Its finished samples would not match the new ones",
                mend=f"Give the same {what} to go on with it, or another --out for a new run",
            )


def _identity(found: RunRecord, wanted: RunRecord) -> Iterator[tuple[str, object, object]]:
    yield "model", found.model.name, wanted.model.name
    yield "model revision", found.model.revision, wanted.model.revision
    yield "model shape", _shape(found.model), _shape(wanted.model)
    yield "capture point", found.capture, wanted.capture
    yield "list of layers", found.layers, wanted.layers
    yield "dtype", found.dtype, wanted.dtype
    yield "tokenizer", found.prompts.tokenizer_hash, wanted.prompts.tokenizer_hash
    yield "chat template", found.prompts.template_hash, wanted.prompts.template_hash
    yield "loss mask", found.prompts.loss_mask, wanted.prompts.loss_mask
    yield "prompt set", found.prompts.fingerprint, wanted.prompts.fingerprint
    yield "engine", found.engine.name, wanted.engine.name


def _shape(model: ModelFacts) -> tuple[str, int, int, int]:
    return model.architecture, model.num_layers, model.hidden_size, model.vocab_size
