"""A power cut after any sync: what the ledger names is there, the run goes on, and nothing finished is computed again.

Inode numbers stand for files, so nothing is removed while it is recorded: the file system would give them out again.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from eaglehs.builder.assemble import check_dumps
from eaglehs.builder.plan import DatasetLayout
from eaglehs.extraction.client import Client, ClientSettings, Outcome
from eaglehs.extraction.run_store import RunStore, open_store
from eaglehs.schemas.atomic import sync_folder
from eaglehs.schemas.ledger import Ledger, LedgerEntry
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder
from eaglehs.schemas.states import Codec

from eaglehs.packing_keeper import PackOptions
from tests.factories.extractions import dataset_bytes, extract_one_step
from tests.factories.prompts import make_prompts
from tests.factories.records import engine_facts, model_facts, run_record
from tests.fakes.engine import FakeEngine

from .power_cut import recorded

LAYOUT = DatasetLayout(layers=(1, 2), hidden_size=32)
PROMPTS = make_prompts(8)


def start(root: Path) -> tuple[RunStore, FakeEngine, Outcome]:
    """Run one start of a two-step extraction to its end."""
    record = run_record(layers=(1, 2), model=model_facts(hidden_size=32), engine=engine_facts(name="fake"))
    engine = FakeEngine(root / ".spool")
    store = open_store(RunFolder(root), record, PROMPTS)
    store.repair()
    store.begin(engine.facts)
    client = Client(engine, store, lambda p, a: check_dumps(p, a.dumps, LAYOUT), ClientSettings())
    return store, engine, asyncio.run(client.run(store.pending(PROMPTS), Silent()))


def test_after_a_power_cut_at_any_sync_no_finished_sample_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    finished_at: list[int] = []
    with recorded(root, monkeypatch) as recorder:
        append = Ledger.append

        def told(ledger: Ledger, entry: LedgerEntry) -> None:
            append(ledger, entry)
            finished_at.append(len(recorder.events))

        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "append", told)
            start(root)
    assert len(finished_at) == len(PROMPTS)
    for num_syncs in range(len(recorder.events) + 1):
        after = tmp_path / f"after-{num_syncs}"
        recorder.rebuild(num_syncs, after)
        told_done = sum(place <= num_syncs for place in finished_at)
        shutil.rmtree(after / ".spool", ignore_errors=True)
        before = {entry.key for entry in Ledger(after / "ledger.jsonl").finished()}
        assert len(before) >= told_done, f"after {num_syncs} syncs the ledger has forgotten samples"
        store, engine, outcome = start(after)
        assert not set(engine.asked) & before, f"after {num_syncs} syncs finished samples were computed again"
        assert outcome.num_done == len(PROMPTS) - len(before)
        assert len(list(store.ledger.finished())) == len(PROMPTS)
        shutil.rmtree(after)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("seed", [0])
def test_after_a_power_cut_in_one_step_mode_no_finished_sample_is_lost_either(
    seed: int, codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "whole"
    root.mkdir()
    (root / "run").mkdir()
    sync_folder(root)
    finished_at: list[int] = []
    with recorded(root, monkeypatch) as recorder:
        sync_folder(root)
        append = Ledger.append

        def told(ledger: Ledger, entry: LedgerEntry) -> None:
            append(ledger, entry)
            finished_at.append(len(recorder.events))

        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "append", told)
            one_step(root, FakeEngine(tmp_path / "spool"), codec)
    whole = dataset_bytes(root / "dataset")
    for num_syncs in range(1 + seed, len(recorder.events) + 1, 3):
        after = tmp_path / f"after-{num_syncs}"
        recorder.rebuild(num_syncs, after)
        (after / "run").mkdir(exist_ok=True)
        before = {entry.key for entry in Ledger(after / "run" / "ledger.jsonl").finished()}
        assert len(before) >= sum(place <= num_syncs for place in finished_at)
        engine = FakeEngine(tmp_path / f"spool-{num_syncs}")
        one_step(after, engine, codec)
        assert not set(engine.asked) & before, f"after {num_syncs} syncs finished samples were computed again"
        assert dataset_bytes(after / "dataset").keys() == whole.keys()
        shutil.rmtree(after)


def one_step(root: Path, engine: FakeEngine, codec: Codec) -> None:
    options = PackOptions(dataset=root / "dataset", shard_size_bytes=20_480, codec=codec)
    extract_one_step(root / "run", PROMPTS, engine, options)
