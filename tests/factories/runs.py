"""Whole runs of made-up prompts and states, on disk as `extract` leaves them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from eaglehs.schemas import codec
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.ledger import LedgerEntry, SampleStatus
from eaglehs.schemas.prompt import PROMPTS_KIND, PROMPTS_VERSION, Prompt
from eaglehs.schemas.run import EngineFacts, ModelFacts, PromptFacts, RunFolder, RunRecord
from eaglehs.schemas.sample import DumpRef

from tests.factories.dumps import HIDDEN_SIZE, LAYERS, RUN_ID, VOCAB_SIZE, make_prompt, make_states, write_dumps

Tamper = Callable[[Path], None]


@dataclass
class SyntheticRun:
    """A run folder and what must come out of it."""

    folder: RunFolder
    record: RunRecord
    prompts: list[Prompt]
    failed: tuple[str, ...] = ()
    next_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder.root

    def prompt(self, key: str) -> Prompt:
        return next(prompt for prompt in self.prompts if prompt.key == key)

    def states(self, key: str) -> dict[str, torch.Tensor]:
        """The sample's states as they were dumped: bfloat16 [T, H] by name."""
        prompt, model = self.prompt(key), self.record.model
        return make_states(key, prompt.num_tokens, layers=self.record.layers, hidden_size=model.hidden_size)

    def bits(self, key: str) -> dict[str, np.ndarray]:
        """What the shard's members must hold, by array name: int32 and uint8 [T, 1], uint16 [T, H]."""
        prompt = self.prompt(key)
        return {
            "input_ids": np.asarray(prompt.input_ids, dtype="<i4")[:, None],
            "loss_mask": np.asarray(prompt.loss_mask, dtype="|u1")[:, None],
            **{name: state.view(torch.uint16).numpy() for name, state in self.states(key).items()},
        }

    def dumps_of(self, key: str) -> list[Path]:
        """The sample's dump files in row order."""
        return sorted(self.folder.dump_path(key, "x").parent.glob(f"*-{key}-*.pt"))


def make_run(
    root: Path,
    *,
    lengths: Sequence[int] | Mapping[str, int] = (5, 12, 33),
    layers: tuple[int, ...] = LAYERS,
    hidden_size: int = HIDDEN_SIZE,
    chunk_rows: int | None = None,
    failed: Mapping[str, str] | None = None,
    unfinished: Sequence[str] = (),
) -> SyntheticRun:
    """Write a run: run.json, prompts.parquet, ledger and dumps.

    Keys are p0, p1 ... or those of `lengths`. `chunk_rows` cuts each sample into several dumps. `failed` maps keys to
    reasons; `unfinished` keys have neither dumps nor a ledger line.
    """
    by_key = dict(lengths) if isinstance(lengths, Mapping) else {f"p{i}": n for i, n in enumerate(lengths)}
    prompts = [make_prompt(key, num_tokens) for key, num_tokens in by_key.items()]
    run = start_run(root, prompts, layers=layers, hidden_size=hidden_size)
    run.failed = tuple(failed or ())
    for number, prompt in enumerate(prompts):
        if prompt.key in run.failed:
            append_ledger(run, prompt, status=SampleStatus.FAILED, reason=(failed or {})[prompt.key])
        elif prompt.key not in unfinished:
            finish_sample(run, prompt, chunk_rows=chunk_rows, next_token=number)
    return run


def make_run_of(root: Path, prompts: Sequence[Prompt]) -> SyntheticRun:
    """Write a run in which each of `prompts` is finished."""
    run = start_run(root, list(prompts))
    for prompt in prompts:
        finish_sample(run, prompt)
    return run


def start_run(
    root: Path, prompts: list[Prompt], *, layers: tuple[int, ...] = LAYERS, hidden_size: int = HIDDEN_SIZE
) -> SyntheticRun:
    """Write a run in which nothing is done yet."""
    root.mkdir(parents=True, exist_ok=True)
    record = make_record(prompts, layers=layers, hidden_size=hidden_size)
    run = SyntheticRun(folder=RunFolder(root), record=record, prompts=prompts)
    write_prompts_file(run.folder.prompts, prompts)
    write_record(run.folder.record, record)
    return run


def finish_sample(
    run: SyntheticRun, prompt: Prompt, *, chunk_rows: int | None = None, next_token: int = 7
) -> list[Path]:
    """Write a sample's dumps and its ledger line."""
    step = chunk_rows or prompt.num_tokens
    bounds = [*range(0, prompt.num_tokens, step), prompt.num_tokens]
    folder = run.folder.dump_path(prompt.key, "x").parent
    paths = write_dumps(folder, prompt, run.states(prompt.key), bounds=bounds)
    run.next_tokens[prompt.key] = next_token
    append_ledger(run, prompt, dumps=paths, next_token=next_token)
    return paths


def append_ledger(
    run: SyntheticRun,
    prompt: Prompt,
    *,
    status: SampleStatus = SampleStatus.DONE,
    reason: str = "",
    dumps: Sequence[Path] = (),
    next_token: int = -1,
) -> None:
    """Append the sample's line to the ledger, with the files as they now are."""
    entry = LedgerEntry(
        key=prompt.key,
        id=prompt.id,
        num_tokens=prompt.num_tokens,
        status=status,
        attempt=0,
        reason=reason,
        next_token=next_token,
        dumps=tuple(dump_ref(path) for path in dumps),
        state_norms={},
    )
    with run.folder.ledger.open("a") as ledger:
        ledger.write(codec.dumps(entry) + "\n")


def relist(run: SyntheticRun, key: str) -> None:
    """Give the ledger a new line with the sample's files as they now are: a fault that extraction did not see."""
    append_ledger(run, run.prompt(key), dumps=run.dumps_of(key), next_token=run.next_tokens[key])


def dump_ref(path: Path) -> DumpRef:
    content = path.read_bytes()
    return DumpRef(name=path.name, size_bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))


def write_prompts_file(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write prompts.parquet as schemas/prompt.py says."""
    columns = {
        "key": pa.array([p.key for p in prompts], pa.string()),
        "id": pa.array([p.id for p in prompts], pa.string()),
        "source": pa.array([p.source for p in prompts], pa.string()),
        "input_ids": pa.array([np.asarray(p.input_ids) for p in prompts], pa.list_(pa.int32())),
        "loss_mask": pa.array([np.asarray(p.loss_mask) for p in prompts], pa.list_(pa.uint8())),
    }
    metadata = {"eaglehs.kind": PROMPTS_KIND, "eaglehs.version": str(PROMPTS_VERSION)}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)


def make_record(
    prompts: Sequence[Prompt], *, layers: tuple[int, ...] = LAYERS, hidden_size: int = HIDDEN_SIZE
) -> RunRecord:
    """Return a run record that fits the prompts."""
    model = ModelFacts(
        name="made-up/model",
        revision="0" * 40,
        architecture="MadeUpForCausalLM",
        num_layers=max(layers) + 2,
        hidden_size=hidden_size,
        vocab_size=VOCAB_SIZE,
        max_position=4096,
    )
    facts = PromptFacts(
        source="made-up.jsonl",
        fingerprint=xxhash.xxh3_128_hexdigest(repr([(p.key, p.id, len(p.input_ids)) for p in prompts]).encode()),
        num_prompts=len(prompts),
        num_tokens=sum(p.num_tokens for p in prompts),
        num_trainable=int(sum(np.sum(p.loss_mask) for p in prompts)),
        skipped={},
        tokenizer_hash="",
        template_hash="",
        loss_mask="given",
        max_tokens=None,
    )
    engine = EngineFacts(name="transformers", versions={"torch": "2"}, command=(), environment={}, device="cpu")
    return RunRecord(
        run_id=RUN_ID,
        created_at="2026-01-02T03:04:05Z",
        eaglehs_version="0.1.0",
        command=("eaglehs", "extract"),
        model=model,
        layers=layers,
        prompts=facts,
        engine=engine,
        settings={},
    )


def change_record(run: SyntheticRun, **fields: object) -> None:
    """Write run.json anew with other values."""
    run.record = replace(run.record, **fields)
    write_record(run.folder.record, run.record)
