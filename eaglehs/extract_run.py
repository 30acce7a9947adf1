"""One extraction from settings to a finished run: the wiring that no folder may do alone.

    settings -> model facts, layers -> prompts -> run there already? -> engine -> store -> client -> summary

Everything that can be refused is refused before the engine starts: a big model takes ten minutes to load.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .engine_start import EngineSettings, open_engine, pick_engine
from .schemas.errors import DataError, InterruptedRunError
from .schemas.progress import Progress
from .schemas.run import EngineFacts, ModelFacts, RunFolder, RunRecord
from .schemas.states import bytes_per_token, check_layers, default_layers

if TYPE_CHECKING:
    from .extraction.client import ClientSettings, Failure, Outcome
    from .extraction.prompts import PreparedPrompts, PromptOptions
    from .extraction.run_store import RunStore

MAX_SKIPPED_SHARE = 0.2
"""Share of the prompt rows that may be left out before a run is called wrong rather than finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """All of one `eaglehs extract`; good enough to run it again."""

    model: str
    prompts: str
    out: Path = Path("run")
    revision: str | None = None
    layers: tuple[int, ...] | None = None
    """None: the profile's, else SGLang's rule [2, n//2, n-3]."""

    loss_mask: str = "assistant"
    max_tokens: int | None = None
    limit: int | None = None
    max_attempts: int = 2
    max_failed: int = 10
    max_skipped_share: float = MAX_SKIPPED_SHARE
    engine: EngineSettings = field(default_factory=EngineSettings)
    command: tuple[str, ...] = ()
    """The command line, for run.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractPlan:
    """What an extraction will do, known before the engine starts."""

    model: ModelFacts
    engine: str
    engine_reason: str
    layers: tuple[int, ...]
    num_prompts: int
    num_tokens: int
    num_trainable: int
    num_finished: int
    """Samples that the run folder already has."""

    bytes_per_token: int
    size_bytes: int
    """Bytes of all states, ids and masks of the run."""

    skipped: dict[str, int]
    warnings: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSummary:
    """What one `extract` did."""

    run: str
    engine: str
    num_samples: int
    """Finished samples in the run now."""

    num_new: int
    """Of those, the ones computed by this start."""

    num_tokens: int
    num_failed: int
    failures: tuple[Failure, ...]
    skipped: dict[str, int]
    state_norms: dict[str, float]
    """State -> mean L2 norm of its rows, weighted by tokens."""

    seconds: float


@dataclass(frozen=True, slots=True)
class _Prepared:
    plan: ExtractPlan
    record: RunRecord
    prompts: PreparedPrompts


def plan_extract(settings: ExtractSettings, progress: Progress) -> ExtractPlan:
    """Return what `extract` would do with these settings, without starting an engine or writing a file."""
    return _prepare(settings, progress).plan


def extract(settings: ExtractSettings, progress: Progress) -> ExtractSummary:
    """Extract all prompts that the run does not have yet.

    Raises:
        UsageError: the settings contradict each other, the model or the run that is there.
        DataError: no prompt is usable, too many were skipped, or too many samples failed.
        EngineError, StorageError: the server or the disk failed; finished samples are kept.
        InterruptedRunError: Ctrl-C or SIGTERM; finished samples are kept.
    """
    from .extraction.process import sigterm_as_interrupt
    from .extraction.run_store import locked

    started = datetime.now(UTC)
    with sigterm_as_interrupt(), ExitStack() as stack:
        try:
            stack.enter_context(locked(settings.out))
            prepared = _prepare(settings, progress)
            _warn(prepared.prompts, progress)
            store, outcome = _run(settings, prepared, progress)
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"stopped; all finished samples are kept in {settings.out}", mend="The same command goes on with it"
            ) from None
        return _summary(settings, prepared, store, outcome, (datetime.now(UTC) - started).total_seconds())


def _prepare(settings: ExtractSettings, progress: Progress) -> _Prepared:
    from .extraction.model_facts import read_model_facts
    from .extraction.prompts import prepare_prompts
    from .extraction.run_store import new_run_id, read_existing
    from .schemas.ledger import Ledger

    engine, reason = pick_engine(settings.engine)
    model = read_model_facts(settings.model, revision=settings.revision)
    layers = _layers(settings, model)
    progress.begin("prompts")
    prompts = prepare_prompts(settings.prompts, model, _prompt_options(settings), progress)
    _check_skipped(settings, prompts)
    record = RunRecord(
        run_id=new_run_id(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        eaglehs_version=__version__,
        command=settings.command,
        model=model,
        layers=layers,
        prompts=prompts.facts,
        engine=EngineFacts(name=engine, versions={}, command=(), environment={}, device=""),
        settings=_settings_text(settings),
    )
    folder = RunFolder(settings.out)
    found = read_existing(folder, record)
    per_token = bytes_per_token(layers, model.hidden_size)
    plan = ExtractPlan(
        model=model,
        engine=engine,
        engine_reason=reason,
        layers=layers,
        num_prompts=prompts.facts.num_prompts,
        num_tokens=prompts.facts.num_tokens,
        num_trainable=prompts.facts.num_trainable,
        num_finished=sum(1 for _ in Ledger(folder.ledger).finished()) if found else 0,
        bytes_per_token=per_token,
        size_bytes=per_token * prompts.facts.num_tokens,
        skipped=prompts.facts.skipped,
        warnings=prompts.warnings,
    )
    return _Prepared(plan, found or record, prompts)


def _run(settings: ExtractSettings, prepared: _Prepared, progress: Progress) -> tuple[RunStore, Outcome]:
    from .builder.assemble import check_dumps
    from .builder.plan import DatasetLayout
    from .extraction.client import Client, Outcome
    from .extraction.run_store import open_store

    folder = RunFolder(settings.out)
    store = open_store(folder, prepared.record, prepared.prompts.prompts)
    repairs = store.repair()
    if repairs.lost_samples or repairs.orphan_files:
        progress.note(
            f"{repairs.lost_samples} finished samples have lost their dumps and are computed again; "
            f"{repairs.orphan_files} dumps of unfinished samples removed"
        )
    pending = store.pending(prepared.prompts.prompts)
    if not pending:
        return store, Outcome(num_done=0, num_tokens=0, failures=())
    tokens = sum(prompt.num_tokens for prompt in pending)
    size_bytes = tokens * prepared.plan.bytes_per_token
    progress.begin("extract", num_samples=len(pending), num_tokens=tokens, size_bytes=size_bytes)
    layout = DatasetLayout(layers=store.record.layers, hidden_size=store.record.model.hidden_size)
    with open_engine(settings.engine, store.record, folder, progress) as engine:
        store.begin(engine.facts)
        client = Client(
            engine, store, lambda prompt, answer: check_dumps(prompt, answer.dumps, layout), _client_settings(settings)
        )
        return store, asyncio.run(client.run(pending, progress))


def _layers(settings: ExtractSettings, model: ModelFacts) -> tuple[int, ...]:
    layers = settings.layers
    if layers is None and settings.engine.profile is not None:
        from .extraction.profile import load_profile

        layers = load_profile(settings.engine.profile).layers
    return check_layers(layers or default_layers(model.num_layers), model.num_layers)


def _prompt_options(settings: ExtractSettings) -> PromptOptions:
    from .extraction.prompts import LossMaskMode, PromptOptions

    return PromptOptions(
        loss_mask=LossMaskMode(settings.loss_mask),
        max_tokens=settings.max_tokens,
        limit=settings.limit,
        tokenizer=settings.model,
        revision=settings.revision,
        trust_remote_code=settings.engine.trust_remote_code,
    )


def _client_settings(settings: ExtractSettings) -> ClientSettings:
    from .extraction.client import ClientSettings

    return ClientSettings(max_attempts=settings.max_attempts, max_failed=settings.max_failed)


def _settings_text(settings: ExtractSettings) -> dict[str, str]:
    """Return the settings that change no row, for run.json."""
    kept = {"concurrency", "dump_dir", "server", "profile"}
    engine = {name: value for name, value in asdict(settings.engine).items() if name in kept and value is not None}
    client = {"max_attempts": settings.max_attempts, "max_failed": settings.max_failed}
    return {name: str(value) for name, value in (engine | client).items()}


def _warn(prompts: PreparedPrompts, progress: Progress) -> None:
    for message, count in prompts.warnings.items():
        progress.note(f"warning ({count} rows): {message}")


def _check_skipped(settings: ExtractSettings, prompts: PreparedPrompts) -> None:
    num_skipped = sum(prompts.facts.skipped.values())
    num_rows = num_skipped + prompts.facts.num_prompts
    if num_skipped > settings.max_skipped_share * num_rows:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(prompts.facts.skipped.items()))
        first = prompts.skipped[0]
        raise DataError(
            f"{num_skipped} of {num_rows} rows of {settings.prompts} would be skipped ({reasons}), "
            f"more than the share {settings.max_skipped_share} that --max-skipped-share allows",
            why=f"First: row {first.row}, {first.detail}",
            mend="Mend the prompts or the flags, or raise --max-skipped-share",
        )


def _summary(
    settings: ExtractSettings, prepared: _Prepared, store: RunStore, outcome: Outcome, seconds: float
) -> ExtractSummary:
    finished = list(store.ledger.finished())
    num_tokens = sum(entry.num_tokens for entry in finished)
    norms = {
        state: sum(entry.state_norms[state] * entry.num_tokens for entry in finished) / num_tokens
        for state in (finished[0].state_norms if finished else {})
    }
    return ExtractSummary(
        run=str(settings.out),
        engine=prepared.plan.engine,
        num_samples=len(finished),
        num_new=outcome.num_done,
        num_tokens=num_tokens,
        num_failed=len(outcome.failures),
        failures=outcome.failures,
        skipped=prepared.plan.skipped,
        state_norms=norms,
        seconds=round(seconds, 3),
    )
