"""One run whose shards go to a Hub while it goes on, as `extract --pack --push` puts it together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from eaglehs.builder.assemble import check_dumps
from eaglehs.cards.write import write_card
from eaglehs.extraction.client import Client, ClientSettings
from eaglehs.extraction.run_store import open_store
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.ledger import Ledger
from eaglehs.schemas.manifest import DatasetFolder, Manifest
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder

from eaglehs.packing_keeper import PackOptions, open_packing
from eaglehs.push_stream import PushOptions, open_push
from tests.factories.extractions import LAYOUT, extract_one_step, record_of
from tests.factories.prompts import make_prompt
from tests.factories.published import REPO, Pusher
from tests.fakes.engine import FakeEngine
from tests.fakes.hub import HubServer

SHARD_BYTES = 40_960
PROMPTS = [make_prompt(f"p{number:03d}", 20) for number in range(40)]
DELETING = PushOptions(repo=REPO, license="mit", deletes=True, pause_s=0.05)


@dataclass
class Runner:
    """One run, as `extract --pack --push` puts it together."""

    folder: Path
    hub: HubServer
    engine: FakeEngine
    options: PackOptions

    @property
    def dataset(self) -> DatasetFolder:
        return DatasetFolder(self.options.dataset)

    @property
    def local(self) -> set[str]:
        return {f"data/{path.name}" for path in self.dataset.data.iterdir()}

    @property
    def finished(self) -> set[str]:
        """Keys of the finished samples."""
        return {entry.key for entry in Ledger(RunFolder(self.folder / "run").ledger).finished()}

    def start(self, push: PushOptions = DELETING, **settings: object):
        """Run one start to its end, and that of its threads, as its process would; returns what was published."""
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        self.engine.asked.clear()
        store = open_store(RunFolder(run), record_of(PROMPTS, self.options), PROMPTS)
        client = Pusher(self.hub, self.options.dataset).client
        with (
            ExitStack() as ended,
            open_packing(store, self.options, Silent()) as (keeper, packed),
            open_push(push, keeper, Silent(), client) as pushing,
        ):
            ended.callback(pushing.stream._thread.join, 120)
            store.repair(packed)
            if pending := store.pending(PROMPTS):
                keeper.begin()
                store.begin(self.engine.facts)
                freeing = ClientSettings(
                    keep_dir=self.options.dataset, frees_room=lambda: pushing.stream.frees_room, **settings
                )
                asyncio.run(Client(self.engine, keeper, self.check, freeing).run(pending, Silent()))
            pushing.stream.close()
            keeper.pack()
            write_card(self.options.dataset, push.terms)
            return pushing.finish()

    def check(self, prompt, answer):
        return check_dumps(prompt, answer.dumps, LAYOUT)

    def assert_whole(self) -> Manifest:
        """Hold `main` against the dataset that the same prompts give without any push; nothing was sent twice."""
        there = {path: file["sha256"] for path, file in self.hub.files(REPO).items() if path.startswith("data/")}
        plain = replace(self.options, dataset=self.folder / "plain")
        if not plain.dataset.exists():
            extract_one_step(self.folder / "plain-run", PROMPTS, FakeEngine(self.folder / "plain-spool"), plain)
        manifest = read_record(Manifest, DatasetFolder(plain.dataset).manifest)
        assert there == {entry.name: entry.sha256 for entry in manifest.shards}
        assert {"README.md", "manifest.json", "_index/samples.parquet"} <= set(self.hub.files(REPO))
        assert read_record(Manifest, self.dataset.manifest).shards == manifest.shards
        assert [sha for sha, count in Counter(self.hub.finished_puts()).items() if count > 1] == []
        assert "eaglehs-upload-main" not in self.hub.refs(REPO)
        return manifest


def wait_for(is_so: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, "took too long"
        threading.Event().wait(0.01)


def down(hub: HubServer, *, times: int = 10**9) -> dict:
    """Let the Hub fail from now on."""
    fault = {"path": "/", "status": 503, "times": times}
    hub.faults.append(fault)
    return fault
