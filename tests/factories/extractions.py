"""Extractions of made-up prompts by the fake engine, in one step or two, as `extract` and `pack` put them together."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from eaglehs.builder.assemble import check_dumps
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.plan import DatasetLayout
from eaglehs.extraction.client import Client, ClientSettings, Outcome
from eaglehs.extraction.run_store import open_store
from eaglehs.schemas.manifest import DatasetFolder
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.prompt import Prompt
from eaglehs.schemas.run import RunFolder, RunRecord

from eaglehs.packing_keeper import PackOptions, open_packing
from tests.factories.records import engine_facts, model_facts, prompt_facts, run_record
from tests.fakes.engine import FakeEngine

LAYOUT = DatasetLayout(layers=(1, 2), hidden_size=32)


def record_of(
    prompts: Sequence[Prompt], options: PackOptions | None = None, *, hidden_size: int = LAYOUT.hidden_size
) -> RunRecord:
    """Return run.json of an extraction of `prompts` by the fake engine."""
    facts = prompt_facts(
        num_prompts=len(prompts),
        num_tokens=sum(prompt.num_tokens for prompt in prompts),
        num_trainable=sum(int(np.sum(prompt.loss_mask)) for prompt in prompts),
    )
    return run_record(
        layers=LAYOUT.layers,
        model=model_facts(hidden_size=hidden_size, vocab_size=500),
        engine=engine_facts(name="fake"),
        prompts=facts,
        packing=options.packing if options else None,
    )


def extract_one_step(
    run: Path, prompts: Sequence[Prompt], engine: FakeEngine, options: PackOptions, **settings: object
) -> Outcome:
    """Run one start of `extract --pack` to its end."""
    run.mkdir(exist_ok=True)
    store = open_store(RunFolder(run), record_of(prompts, options, hidden_size=engine.hidden_size), prompts)
    with open_packing(store, options, Silent()) as (keeper, packed):
        store.repair(packed)
        pending = store.pending(prompts)
        outcome = Outcome(num_done=0, num_tokens=0, failures=())
        if pending:
            keeper.begin()
            store.begin(engine.facts)
            outcome = _run(engine, keeper, pending, settings)
        keeper.pack()
    return outcome


def extract_two_steps(
    run: Path, prompts: Sequence[Prompt], engine: FakeEngine, options: PackOptions, **settings: object
) -> None:
    """Run `extract` and then `pack`, which has nothing of the former but its files."""
    _extract_dumps(run, prompts, engine, settings)
    pack = PackSettings(
        shard_size_bytes=options.shard_size_bytes,
        shuffle_seed=options.shuffle_seed,
        shard_multiple=options.shard_multiple,
        codec=options.codec,
    )
    pack_run(run, options.dataset, pack, Silent())


def _extract_dumps(run: Path, prompts: Sequence[Prompt], engine: FakeEngine, settings: dict[str, object]) -> None:
    run.mkdir(exist_ok=True)
    store = open_store(RunFolder(run), record_of(prompts, hidden_size=engine.hidden_size), prompts)
    store.repair()
    store.begin(engine.facts)
    _run(engine, store, store.pending(prompts), settings)


def dataset_bytes(root: Path) -> dict[str, bytes]:
    """Return the files that make a dataset: shards, index, manifest; whatever else is in `data/` too."""
    folder = DatasetFolder(root)
    files = [folder.manifest, folder.index, *folder.data.iterdir()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def _run(engine: FakeEngine, keeper, prompts: Sequence[Prompt], settings: dict[str, object]) -> Outcome:
    layout = DatasetLayout(layers=engine.layers, hidden_size=engine.hidden_size)

    def check(prompt: Prompt, answer):
        return check_dumps(prompt, answer.dumps, layout)

    return asyncio.run(Client(engine, keeper, check, ClientSettings(**settings)).run(prompts, Silent()))
