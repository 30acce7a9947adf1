"""`extract` and `pack` on disks that are full, small, read-only or slow: the numbers, the exit code, what is kept."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from eaglehs.builder import pack
from eaglehs.builder.assemble import check_dumps
from eaglehs.builder.pack import PackSettings
from eaglehs.builder.plan import DatasetLayout
from eaglehs.builder.verify import verify_dataset
from eaglehs.extraction.client import Client, ClientSettings
from eaglehs.extraction.room import RESERVE_BYTES, DiskNearlyFullError
from eaglehs.extraction.run_store import RunStore, open_store
from eaglehs.extraction.spool import dump_bytes
from eaglehs.schemas.errors import StorageError
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder

from tests.disks.mounts import fill, mounted
from tests.eaglehs import cli
from tests.factories.prompts import make_prompts
from tests.factories.records import engine_facts, model_facts, run_record
from tests.factories.runs import make_run
from tests.fakes.engine import FakeEngine
from tests.kills import client as commands
from tests.kills.cases import NUM_PROMPTS
from tests.kills.matrix import finished, ledger_of, num_lines
from tests.kills.rigs import TRANSFORMERS, plain_rig

HIDDEN = 4096
BYTES_PER_TOKEN = 3 * 2 * HIDDEN + 4
LAYOUT = DatasetLayout(layers=(1, 2), hidden_size=HIDDEN)
PROMPTS = make_prompts(24)


def start(root: Path, *, spool: Path, engine: FakeEngine | None = None, **settings: object) -> tuple[RunStore, object]:
    """Run one start of an extraction; return the store, and the outcome or the error that ended it."""
    record = run_record(layers=(1, 2), model=model_facts(hidden_size=HIDDEN), engine=engine_facts(name="fake"))
    engine = engine or FakeEngine(spool, hidden_size=HIDDEN)
    store = open_store(RunFolder(root), record, PROMPTS)
    store.repair()
    store.begin(engine.facts)
    options = ClientSettings(bytes_per_token=BYTES_PER_TOKEN, **settings)  # type: ignore[arg-type]
    client = Client(engine, store, lambda p, a: check_dumps(p, a.dumps, LAYOUT), options)
    try:
        return store, asyncio.run(client.run(store.pending(PROMPTS), Silent()))
    except StorageError as fault:
        return store, fault


def test_a_disk_that_fills_up_stops_the_run_in_order_before_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = RunStore.finish

    def finish_and_linger(store: RunStore, *arguments: object) -> object:
        """Let a sample be on the disk and yet count as under way."""
        entry = finish(store, *arguments)  # type: ignore[arg-type]
        time.sleep(0.1)
        return entry

    with mounted(tmp_path / "disk", "16m") as disk:
        ballast = fill(disk, leave_bytes=RESERVE_BYTES + 2_000_000)
        store, fault = start(disk, spool=tmp_path / "spool", keep_dir=disk)
        assert isinstance(fault, DiskNearlyFullError)
        assert fault.exit_code == 4
        assert f"{fault.free_bytes:,} bytes free" in str(fault)
        assert fault.free_bytes > 0
        done = {entry.key for entry in store.ledger.finished()}
        assert 0 < len(done) < len(PROMPTS)
        assert list((tmp_path / "spool").iterdir()) == []  # nothing was cut off: those under way were kept
        ballast.unlink()
        left = sum(dump_bytes(prompt.num_tokens, BYTES_PER_TOKEN) for prompt in PROMPTS if prompt.key not in done)
        fill(disk, leave_bytes=RESERVE_BYTES + left + 100_000)  # just enough
        engine = FakeEngine(tmp_path / "spool", hidden_size=HIDDEN)
        monkeypatch.setattr(RunStore, "finish", finish_and_linger)
        store, _ = start(disk, spool=tmp_path / "spool", engine=engine, keep_dir=disk)
        assert len(list(store.ledger.finished())) == len(PROMPTS)
        assert not set(engine.asked) & done


def test_a_disk_that_is_full_in_the_middle_of_a_move_keeps_what_is_whole(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "16m") as disk:
        ballast = fill(disk, leave_bytes=1_500_000)
        store, fault = start(disk, spool=tmp_path / "spool")
        assert isinstance(fault, StorageError)
        assert "No space left on device" in str(fault)
        assert " bytes are free there" in str(fault)
        assert not list(disk.rglob("*.part"))
        done = {entry.key for entry in store.ledger.finished()}
        assert 0 < len(done) < len(PROMPTS)
        ballast.unlink()
        engine = FakeEngine(tmp_path / "spool", hidden_size=HIDDEN)
        store, _ = start(disk, spool=tmp_path / "spool", engine=engine)
        assert len(list(store.ledger.finished())) == len(PROMPTS)
        assert not set(engine.asked) & done


def test_a_disk_that_others_fill_under_a_pack_keeps_finished_shards(tmp_path: Path, monkeypatch) -> None:
    run = make_run(tmp_path / "run", lengths=[400] * 9, hidden_size=512)
    settings = PackSettings(shard_size_bytes=8_000_000, workers=1)
    with mounted(tmp_path / "disk", "24m") as disk:
        ballast = fill(disk, leave_bytes=9_000_000)
        with monkeypatch.context() as patch:
            patch.setattr(pack, "check_space", lambda *_: None)  # they come after it was looked at
            with pytest.raises(StorageError, match=r"train-00001.tar can't be written: No space left .* are kept"):
                pack.pack_run(run.root, disk / "d", settings, Silent())
        assert [path.name for path in (disk / "d/data").iterdir()] == ["train-00000.tar"]
        ballast.unlink()
        assert pack.pack_run(run.root, disk / "d", settings, Silent()).num_reused == 1
        assert verify_dataset(disk / "d").is_good


def test_a_writer_slower_than_the_engine_holds_requests_back_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, most = tmp_path / "spool", 0
    finish, lock = RunStore.finish, threading.Lock()

    def slow(store: RunStore, *arguments: object) -> object:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in spool.glob("*.pt")))
        with lock:
            time.sleep(0.05)
        return finish(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RunStore, "finish", slow)
    bound = 1_000_000
    engine = FakeEngine(spool, hidden_size=HIDDEN, concurrency=16)
    store, _ = start(tmp_path, spool=spool, engine=engine, spool_bytes=bound)
    assert len(list(store.ledger.finished())) == len(PROMPTS)
    assert 0 < most <= bound


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory):
    return plain_rig(tmp_path_factory.mktemp("disks"), TRANSFORMERS)


def extract(rig, *options: object) -> tuple[object, ...]:
    return ("extract", "--model", rig.model, "--prompts", rig.prompts, "--layers", "1,4,6", *TRANSFORMERS, *options)


@pytest.mark.parametrize(
    "pack", [(), ("--pack", "disk/dataset", "--shard-size", "500KB")], ids=["two-step", "one-step"]
)
def test_a_disk_that_others_fill_during_the_run_stops_it_and_the_same_command_goes_on(
    pack: tuple[str, ...], rig, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "24m") as disk:
        command = extract(rig, "--out", "disk/run", "--dump-dir", tmp_path / "spool", *pack)
        running, output = cli.start_eaglehs(*command, cwd=tmp_path, holds_at=5), tmp_path / "out.txt"
        cli.wait_until(lambda: num_lines(disk) == 5, running)
        ballast = fill(disk, leave_bytes=RESERVE_BYTES // 2)
        (tmp_path / cli.GO).touch()
        assert running.wait(timeout=240) == 4, output.read_text()
        text = output.read_text()
        assert "the disk of disk/" in text
        assert " bytes free; samples under way" in text
        assert "Traceback" not in text
        before = ledger_of(disk)
        assert 5 <= len(finished(before)) < NUM_PROMPTS
        ballast.unlink()
        assert commands.run(*command, cwd=tmp_path) == 0, output.read_text()
        after = ledger_of(disk)
        assert after[: len(before)] == before
        assert len(finished(after)) == len(after) == NUM_PROMPTS
        assert commands.run("verify", "disk/dataset" if pack else "disk/run", cwd=tmp_path) == 0
        assert not list(disk.rglob("*.part"))


def test_a_read_only_output_is_said_so_before_anything_is_loaded(rig, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m", "ro"):
        assert commands.run(*extract(rig, "--out", "disk/run"), cwd=tmp_path) == 4
    assert "can't be written: Read-only file system" in (tmp_path / "out.txt").read_text()


def test_an_output_that_can_not_hold_the_run_is_refused_with_the_numbers(rig, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        assert commands.run(*extract(rig, "--out", "disk/run"), cwd=tmp_path) == 4
        assert not (disk / "run" / "ledger.jsonl").exists()
    text = (tmp_path / "out.txt").read_text()
    assert "disk" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("size", ["16m", "64m"])
def test_a_small_dump_folder_is_enough_for_samples_that_fit_one_by_one(size: str, rig, tmp_path: Path) -> None:
    """16 MB, and 64 MB as /dev/shm has in a container."""
    with mounted(tmp_path / "shm", size) as shm:
        assert commands.run(*extract(rig, "--dump-dir", shm / "spool"), cwd=tmp_path) == 0
        assert not list(shm.rglob("*.pt"))
    assert len(finished(ledger_of(tmp_path))) == NUM_PROMPTS


def test_a_dump_folder_too_small_for_a_sample_is_refused_with_the_numbers(rig, tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", "64k") as shm:
        assert commands.run(*extract(rig, "--dump-dir", shm / "spool"), cwd=tmp_path) == 4
    text = (tmp_path / "out.txt").read_text()
    assert "--dump-dir" in text
    assert "Traceback" not in text
