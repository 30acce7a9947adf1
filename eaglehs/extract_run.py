"""One extraction from settings to a finished run: the wiring that no folder may do alone.

    settings -> model facts, layers -> prompts -> run there already? -> engine -> store -> client -> summary

Everything that can be refused is refused before the engine starts: a big model takes ten minutes to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .engine_start import EngineSettings, dump_dirs, open_engine, pick_engine, starts_server
from .extract_loop import Engines, ExtractLoop
from .extract_summary import Done, ExtractSummary, summarize
from .memory import allocate_plainly
from .packing_keeper import PackOptions, check_same_packing, open_packing
from .preflight import Forecast, Job, check_room, forecast
from .push_stream import Push, PushOptions, check_options, open_push
from .schemas.counts import counted
from .schemas.errors import DataError, InterruptedRunError
from .schemas.ledger import Ledger, SampleStatus
from .schemas.manifest import DatasetFolder
from .schemas.progress import Progress
from .schemas.run import EngineFacts, ModelFacts, RunFolder, RunRecord
from .schemas.states import bytes_per_token, check_layers, default_layers

if TYPE_CHECKING:
    from .extraction.client import ClientSettings, Outcome
    from .extraction.engines.protocol import Answer
    from .extraction.keeper import Keeper
    from .extraction.prompts import PreparedPrompts, PromptOptions
    from .extraction.run_store import RunStore
    from .schemas.prompt import Prompt
    from .schemas.sample import CheckedSample

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
    pack: PackOptions | None = None
    """None: keep the dumps in the run, for `eaglehs pack`."""

    push: PushOptions | None = None
    """With `pack`: send finished shards to the Hub as they come."""

    spool_bytes: int | None = None
    """Most bytes of dumps under way or waiting; None: from the free space of the dump folder."""

    rate: float | None = None
    """Tokens a second, for the time that is told before the start; None: as the run's ledger says."""

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
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class _Prepared:
    plan: ExtractPlan
    record: RunRecord
    prompts: PreparedPrompts
    job: Job


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
    from .extraction.interrupts import sigterm_as_interrupt
    from .extraction.room import as_storage_error
    from .extraction.run_store import locked

    allocate_plainly()
    started = datetime.now(UTC)
    with sigterm_as_interrupt(), ExitStack() as stack:
        try:
            stack.enter_context(locked(settings.out))
            prepared = _prepare(settings, progress)
            _warn(prepared, progress)
            check_room(prepared.job, prepared.plan.forecast)
            done = _run(settings, prepared, progress)
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"stopped; all finished samples are kept in {settings.out}", mend="The same command goes on with it"
            ) from None
        except OSError as fault:
            raise as_storage_error(fault, settings.out) or fault from None
        return summarize(done, prepared.prompts.prompts, (datetime.now(UTC) - started).total_seconds())


def _prepare(settings: ExtractSettings, progress: Progress) -> _Prepared:
    from .extraction.model_facts import read_model_facts
    from .extraction.prompts import prepare_prompts
    from .extraction.run_store import new_run_id, read_existing

    if settings.push and settings.pack:
        check_options(settings.push, DatasetFolder(settings.pack.dataset))
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
        packing=settings.pack.packing if settings.pack else None,
    )
    folder = RunFolder(settings.out)
    found = read_existing(folder, record)
    per_token = bytes_per_token(layers, model.hidden_size)
    job = _job(settings, prompts.prompts, record, Ledger(folder.ledger) if found else None)
    if found and any(entry.status is SampleStatus.DONE for entry in job.entries.values()):
        check_same_packing(found, settings.pack, settings.out)
    elif found:  # nothing lies anywhere yet
        found = replace(found, packing=record.packing)
    plan = ExtractPlan(
        model=model,
        engine=engine,
        engine_reason=reason,
        layers=layers,
        num_prompts=prompts.facts.num_prompts,
        num_tokens=prompts.facts.num_tokens,
        num_trainable=prompts.facts.num_trainable,
        num_finished=sum(entry.status is SampleStatus.DONE for entry in job.entries.values()),
        bytes_per_token=per_token,
        size_bytes=per_token * prompts.facts.num_tokens,
        skipped=prompts.facts.skipped,
        warnings=prompts.warnings,
        forecast=forecast(job),
    )
    return _Prepared(plan, found or record, prompts, job)


def _job(settings: ExtractSettings, prompts: Sequence[Prompt], record: RunRecord, ledger: Ledger | None) -> Job:
    from .builder.plan import DatasetLayout
    from .extraction.engines.sglang import DEFAULT_CONCURRENCY

    dirs = dump_dirs(settings.engine, record.engine.name, record, RunFolder(settings.out))
    is_local = record.engine.name == "transformers"
    return Job(
        prompts=prompts,
        entries=ledger.entries if ledger else {},
        layout=DatasetLayout(layers=record.layers, hidden_size=record.model.hidden_size),
        bytes_per_token=bytes_per_token(record.layers, record.model.hidden_size),
        run=settings.out,
        dump_dirs=dirs,
        concurrency=1 if is_local else (settings.engine.concurrency or DEFAULT_CONCURRENCY) * len(dirs),
        pack=settings.pack,
        spool_bytes=settings.spool_bytes,
        rate=settings.rate,
    )


def _run(settings: ExtractSettings, prepared: _Prepared, progress: Progress) -> Done:
    from .cards.write import write_card
    from .extraction.client import Outcome
    from .extraction.run_store import open_store

    outcome, dataset = Outcome(num_done=0, num_tokens=0, failures=()), None
    with ExitStack() as stack:
        store = open_store(RunFolder(settings.out), prepared.record, prepared.prompts.prompts)
        store.record = prepared.record
        packing, packed = None, frozenset[str]()
        if settings.pack:
            packing, packed = stack.enter_context(open_packing(store, settings.pack, progress))
        push = stack.enter_context(open_push(settings.push, packing, progress)) if settings.push and packing else None
        _repair(store, packed, progress)
        if pending := store.pending(prepared.prompts.prompts):
            if packing:
                packing.begin()
            work = _Work(store, packing or store, pending, push)
            outcome = _extract_pending(settings, prepared.plan, work, progress)
        if packing and settings.pack:
            if push:
                progress.note("waiting for the shards that are still to be sent")
                push.stream.close()
            progress.begin("pack")
            dataset = packing.pack()
            write_card(settings.pack.dataset, settings.push.terms if settings.push else None)
        published = push.finish() if push else None
    return Done(store, outcome, dataset, published)


@dataclass(frozen=True, slots=True)
class _Work:
    store: RunStore
    keeper: Keeper
    """The store, or who packs at once."""

    pending: Sequence[Prompt]
    push: Push | None


def _extract_pending(settings: ExtractSettings, plan: ExtractPlan, work: _Work, progress: Progress) -> Outcome:
    from .builder.assemble import check_dumps
    from .builder.plan import DatasetLayout
    from .extraction.client import Client
    from .extraction.final_check import FinalCheck

    store = work.store
    tokens = sum(prompt.num_tokens for prompt in work.pending)
    size_bytes = tokens * plan.bytes_per_token
    progress.begin("extract", num_samples=len(work.pending), num_tokens=tokens, size_bytes=size_bytes)
    layout = DatasetLayout(layers=store.record.layers, hidden_size=store.record.model.hidden_size)

    final = FinalCheck(store.record.model, progress.note)

    def check(prompt: Prompt, answer: Answer) -> CheckedSample:
        checked = check_dumps(prompt, answer.dumps, layout)
        final.check(prompt, answer)
        return checked

    engines = Engines(
        open=lambda: open_engine(settings.engine, store.record, RunFolder(settings.out), progress),
        client_of=lambda engine: Client(engine, work.keeper, check, _client_settings(settings, plan, work.push)),
        max_restarts=settings.engine.max_restarts if starts_server(settings.engine, plan.engine) else 0,
        max_failed=settings.max_failed,
    )
    return ExtractLoop(engines, store, progress).run(work.pending)


def _repair(store: RunStore, packed: frozenset[str], progress: Progress) -> None:
    repairs = store.repair(packed)
    if repairs.lost_samples or repairs.orphan_files:
        progress.note(
            f"{counted(repairs.lost_samples, 'finished sample has', 'finished samples have')} lost "
            f"their bytes, to be computed again; {counted(repairs.orphan_files, 'dump')} of unfinished samples removed"
        )


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


def _client_settings(settings: ExtractSettings, plan: ExtractPlan, push: Push | None) -> ClientSettings:
    from .extraction.client import ClientSettings

    def frees_room() -> bool:
        return push is not None and push.stream.frees_room

    return ClientSettings(
        max_attempts=settings.max_attempts,
        max_failed=settings.max_failed,
        spool_bytes=plan.forecast.spool_bytes,
        bytes_per_token=plan.bytes_per_token,
        keep_dir=settings.pack.dataset if settings.pack else settings.out,
        frees_room=frees_room if settings.push and settings.push.deletes else None,
    )


def _settings_text(settings: ExtractSettings) -> dict[str, str]:
    """Return the settings that change no row, for run.json."""
    kept = {"concurrency", "dump_dir", "profile"}
    engine = {name: value for name, value in asdict(settings.engine).items() if name in kept and value is not None}
    if settings.engine.servers:
        engine["server"] = " ".join(settings.engine.servers)
    client = {"max_attempts": settings.max_attempts, "max_failed": settings.max_failed}
    return {name: str(value) for name, value in (engine | client).items()}


def _warn(prepared: _Prepared, progress: Progress) -> None:
    for message, count in prepared.prompts.warnings.items():
        progress.note(f"warning ({counted(count, 'row')}): {message}")


def _check_skipped(settings: ExtractSettings, prompts: PreparedPrompts) -> None:
    num_skipped = sum(prompts.facts.skipped.values())
    num_rows = num_skipped + prompts.facts.num_prompts
    if num_skipped > settings.max_skipped_share * num_rows:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(prompts.facts.skipped.items()))
        first = prompts.skipped[0]
        raise DataError(
            f"{num_skipped:,} of {counted(num_rows, 'row')} of {settings.prompts} would be skipped ({reasons}), "
            f"more than the share {settings.max_skipped_share} that --max-skipped-share allows",
            why=f"First: row {first.row}, {first.detail}",
            mend="Mend the prompts or the flags, or raise --max-skipped-share",
        )
