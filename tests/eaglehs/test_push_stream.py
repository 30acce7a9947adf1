"""Shards that go to the Hub while the run goes on: each is sent once and computed once, whatever fails or stops."""

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder.hub_errors import HubError
from eaglehs.builder.inspect import inspect_path
from eaglehs.builder.preview import PreviewSettings, write_preview
from eaglehs.builder.publish_stream import LostShardError
from eaglehs.builder.pushed_shards import PushedShards, ShardsOnHubError
from eaglehs.builder.statistics import MeasureSettings, measure_dataset
from eaglehs.builder.stored_samples import open_stored
from eaglehs.builder.stream import stream
from eaglehs.builder.verify import verify_dataset, verify_run
from eaglehs.extraction import client as client_module
from eaglehs.extraction.room import DiskNearlyFullError
from eaglehs.extraction.run_store import open_store
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.errors import EngineError, StorageError, UsageError
from eaglehs.schemas.manifest import Manifest
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder

from eaglehs.packing_keeper import PackOptions, open_packing
from eaglehs.push_stream import open_push
from tests.factories.extractions import record_of
from tests.factories.published import REPO, TOKENS, Pusher, by_lfs, use_hub
from tests.factories.push_runs import DELETING, PROMPTS, SHARD_BYTES, Runner, down, wait_for
from tests.fakes.engine import FakeEngine
from tests.fakes.hub import start_hub


@pytest.fixture(autouse=True)
def lfs():
    with by_lfs():
        yield


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """The client library has waits of its own, 23 seconds in all."""
    wait = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: wait(min(seconds, 0.02)))
    monkeypatch.setattr(client_module, "ROOM_POLL_S", 0.01)


@pytest.fixture
def hub(tmp_path: Path):
    hub = start_hub(tmp_path / "hub", TOKENS)
    yield hub
    hub.stop()


@pytest.fixture
def runner(tmp_path, hub) -> Runner:
    options = PackOptions(dataset=tmp_path / "dataset", shard_size_bytes=SHARD_BYTES, is_drained=True)
    return Runner(tmp_path, hub, FakeEngine(tmp_path / "spool"), options)


def test_shards_are_sent_deleted_and_shown_whole_at_the_end(runner):
    published = runner.start()
    manifest = runner.assert_whole()
    assert published.revision == runner.hub.refs(REPO)["main"]
    assert len(manifest.shards) > 5
    assert runner.local == set()
    report = verify_dataset(runner.dataset.root)
    assert report.faults == ()
    address = f"hf://datasets/{REPO}@{published.revision}"
    assert report.only_remote == tuple(f"{address}: {entry.name}" for entry in manifest.shards)
    run_report = verify_run(runner.folder / "run")
    assert (run_report.faults, len(run_report.only_remote)) == ((), len(manifest.shards))
    again = runner.start()
    assert (again.is_unchanged, again.revision) == (True, published.revision)
    assert not runner.engine.asked
    runner.assert_whole()


def test_without_deleting_the_shards_stay(runner):
    runner.start(replace(DELETING, deletes=False))
    assert runner.local == {entry.name for entry in runner.assert_whole().shards}
    assert verify_dataset(runner.dataset.root).only_remote == ()


def test_shards_arrive_while_the_run_goes_on_and_main_shows_none_of_them(runner):
    seen: list[int] = []

    def look(prompt, number, answer):
        wait_for(runner.hub.finished_puts)
        seen.append(len(runner.hub.finished_puts()))
        assert not [path for path in runner.hub.files(REPO) if path.startswith("data/")]
        return answer

    runner.engine.concurrency = 1
    runner.engine.faults = {PROMPTS[-1].key: look}
    runner.start()
    assert seen[0] > 0
    runner.assert_whole()


@pytest.mark.parametrize("dies_at", [1, 13, 26, 39])
def test_a_run_that_stops_goes_on_with_nothing_sent_or_computed_twice(runner, dies_at):
    def die(prompt, number, answer):
        raise EngineError("gone")

    runner.engine.faults = {PROMPTS[dies_at].key: die}
    with pytest.raises(EngineError, match="gone"):
        runner.start()
    first = runner.finished
    runner.engine.faults = {}
    runner.start()
    assert set(runner.engine.asked) == {prompt.key for prompt in PROMPTS} - first
    runner.assert_whole()


def test_a_shard_that_was_filled_when_the_run_died_is_sent_and_deleted_as_all_others(runner, monkeypatch):
    def die(*_):
        raise EngineError("gone")

    with monkeypatch.context() as killed, pytest.raises(EngineError, match="gone"):
        killed.setattr("eaglehs.builder.one_step.make_shard", die)
        runner.start()
    assert not any(path.suffix == ".tar" for path in runner.dataset.data.iterdir())
    runner.start()
    assert runner.local == set()
    runner.assert_whole()


def test_a_hub_that_is_down_for_a_while_is_waited_for(runner):
    def fail_now(prompt, number, answer):
        down(runner.hub, times=20)
        return answer

    def wait(prompt, number, answer):
        wait_for(lambda: not runner.hub.faults or not runner.hub.faults[0]["times"])
        return answer

    runner.engine.concurrency = 1
    runner.engine.faults = {PROMPTS[12].key: fail_now, PROMPTS[-1].key: wait}
    runner.start()
    assert runner.engine.asked.total() == len(PROMPTS)
    runner.assert_whole()


def test_a_hub_that_stays_down_loses_no_sample(runner):
    def fail_now(prompt, number, answer):
        down(runner.hub)
        return answer

    runner.engine.faults = {PROMPTS[12].key: fail_now}
    with pytest.raises(HubError):
        runner.start()
    assert verify_dataset(runner.dataset.root).faults == ()  # whole here, but for what the Hub has
    runner.hub.faults.clear()
    runner.start()
    assert not runner.engine.asked
    runner.assert_whole()


def test_a_stream_of_shards_that_are_only_on_the_hub_is_told_where_and_how_to_go_on(runner):
    published = runner.start()
    address = f"hf://datasets/{REPO}@{published.revision}"
    with pytest.raises(ShardsOnHubError) as told:
        stream(runner.dataset.root)
    assert f"{address}: data/train-00000.tar and" in told.value.what
    assert f"Stream, verify or inspect it there: {address}." in told.value.mend
    assert f"hf download {REPO} --repo-type dataset --revision {published.revision} " in told.value.mend
    assert inspect_path(runner.dataset.root).on_hub.startswith(f"{address}: data/train-00000.tar and")


def looked_at(folder: Path) -> list[object]:
    """Return what report, preview and `verify --model` see of a dataset."""
    measured = measure_dataset(folder, MeasureSettings(num_excerpts=3))
    preview = write_preview(folder, PreviewSettings(num_samples=9))
    with open_stored(folder) as stored:
        read = [stored.read(sample.key, 7) for sample in stored.listed[::7]]
    rows = [[part.tolist() for part in (found.input_ids, found.last_final, *found.states.values())] for found in read]
    return [measured, preview, rows]


def test_what_looks_at_a_few_samples_reads_them_on_the_hub_and_sees_the_same(runner, monkeypatch):
    runner.start()
    use_hub(monkeypatch, runner.hub)
    runner.assert_whole()
    runner.hub.log.clear()
    seen = looked_at(runner.dataset.root)
    assert seen == looked_at(runner.folder / "plain")
    assert any("/resolve/" in request["path"] and ".tar" in request["path"] for request in runner.hub.log)
    assert runner.local == set()  # and nothing of them is kept here
    shutil.copytree(runner.folder / "plain" / "data", runner.dataset.data, dirs_exist_ok=True)
    assert len(list(stream(runner.dataset.root))) == len(PROMPTS)  # brought back
    assert inspect_path(runner.dataset.root).on_hub == ""


def test_shards_whose_push_has_not_ended_are_told_with_what_ends_it(runner):
    def fail_now(prompt, number, answer):
        wait_for(lambda: PushedShards(runner.dataset).note("data/train-00000.tar"))
        down(runner.hub)
        return answer

    runner.engine.faults = {PROMPTS[30].key: fail_now}
    with pytest.raises(HubError):
        runner.start()
    with pytest.raises(ShardsOnHubError, match=rf"{REPO}: data/train-00000.tar.*run the same `eaglehs extract --push`"):
        stream(runner.dataset.root)
    assert verify_dataset(runner.dataset.root).only_remote[0] == f"{REPO}: data/train-00000.tar"
    runner.hub.faults.clear()
    revision = runner.start().revision
    assert verify_dataset(runner.dataset.root).only_remote[0].startswith(f"hf://datasets/{REPO}@{revision}: ")


@pytest.fixture
def small_disk(runner, monkeypatch):
    """A disk that holds three shards; returns the most bytes that were ever there."""
    limit, peak = 3 * SHARD_BYTES, [0]

    def check_room(folder: Path, needed_bytes: int) -> None:
        used = disk_bytes(folder / "data")
        peak[0] = max(peak[0], used)
        if used + needed_bytes > limit:
            raise DiskNearlyFullError(folder, limit - used, needed_bytes)

    monkeypatch.setattr(client_module, "check_room", check_room)
    return peak


def disk_bytes(folder: Path) -> int:
    """Return what the files of a folder take on the disk; one may be deleted meanwhile."""
    used = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            used += path.stat().st_blocks * 512
    return used


def test_a_dataset_larger_than_the_disk_goes_through_it(runner, small_disk):
    runner.hub.bytes_per_s = 2_000_000
    runner.start(bytes_per_token=1)
    manifest = runner.assert_whole()
    assert manifest.totals.size_bytes > 5 * SHARD_BYTES
    assert 0 < small_disk[0] <= 4 * SHARD_BYTES
    assert runner.local == set()


def test_a_full_disk_and_a_failing_hub_end_the_run_in_order_and_it_goes_on(runner, small_disk):
    def fail_now(prompt, number, answer):
        down(runner.hub)
        return answer

    runner.engine.faults = {PROMPTS[0].key: fail_now}
    with pytest.raises(StorageError) as stopped:
        runner.start(replace(DELETING, pause_s=30), bytes_per_token=1)
    assert stopped.value.exit_code == 4
    first = runner.finished
    assert first == set(runner.engine.asked)  # what was under way was kept
    assert 0 < len(first) < len(PROMPTS)
    runner.hub.faults.clear()
    runner.engine.faults = {}
    runner.start(bytes_per_token=1)
    assert set(runner.engine.asked) == {prompt.key for prompt in PROMPTS} - first
    runner.assert_whole()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_not_waited_for_once_the_thread_that_frees_it_is_gone(runner, small_disk, monkeypatch):
    monkeypatch.setattr("eaglehs.builder.publish_stream.shard_file", None)  # a mistake of ours
    with pytest.raises(DiskNearlyFullError):
        runner.start(bytes_per_token=1)
    monkeypatch.undo()
    runner.start()
    runner.assert_whole()


def test_a_shard_that_lacks_a_sample_stays_here_and_is_filled_later(runner):
    runner.engine.faults = {PROMPTS[9].key: lambda prompt, number, answer: replace(answer, cached_tokens=1)}
    runner.start()
    assert len(runner.local) == 1
    assert read_record(Manifest, runner.dataset.manifest).totals.num_samples == len(PROMPTS) - 1
    runner.engine.faults = {}
    runner.start()
    assert set(runner.engine.asked) == {PROMPTS[9].key}
    runner.assert_whole()


def test_shards_that_the_hub_lost_are_told_before_anything_is_computed(runner):
    def die(prompt, number, answer):
        wait_for(lambda: PushedShards(runner.dataset).note("data/train-00000.tar"))
        raise EngineError("gone")

    runner.engine.faults = {PROMPTS[30].key: die}
    with pytest.raises(EngineError):
        runner.start()
    Pusher(runner.hub, runner.dataset.root).client.drop_branch("eaglehs-upload-main")
    with pytest.raises(LostShardError, match="computed anew"):
        runner.start()
    with pytest.raises(UsageError, match=f"Go on with --push {REPO}"):
        _elsewhere(runner)


def _elsewhere(runner: Runner) -> None:
    other = Pusher(runner.hub, runner.dataset.root, repo="org/other").client
    store = open_store(RunFolder(runner.folder / "run"), record_of(PROMPTS, runner.options), PROMPTS)
    with (
        open_packing(store, runner.options, Silent()) as (keeper, _),
        open_push(replace(DELETING, repo="org/other"), keeper, Silent(), other),
    ):
        pass


@pytest.mark.parametrize("push", [replace(DELETING, license=""), replace(DELETING, license="other")])
def test_terms_are_asked_for_before_anything_is_made(runner, push):
    with pytest.raises(UsageError, match="license"):
        runner.start(push)
    assert not runner.hub.log
