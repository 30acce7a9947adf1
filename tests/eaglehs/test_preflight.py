"""What an extraction will need, reckoned to the byte, and refused with numbers where it does not fit."""

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
from eaglehs.builder.plan import SampleTooLongError
from eaglehs.builder.pushed_shards import PushedShards
from eaglehs.extraction.spool import SpoolTooSmallError, dump_bytes
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.ledger import LedgerEntry, SampleStatus
from eaglehs.schemas.manifest import DatasetFolder, ShardEntry, shard_name
from eaglehs.schemas.states import Codec, bytes_per_token

from eaglehs import preflight
from eaglehs.packing_keeper import PackOptions
from eaglehs.preflight import Job, NoRoomError, check_room, forecast, measured_rate
from tests.factories.extractions import LAYOUT, extract_one_step
from tests.factories.prompts import make_prompt, make_prompts
from tests.fakes.engine import FakeEngine

PER_TOKEN = bytes_per_token(LAYOUT.layers, LAYOUT.hidden_size)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(
        prompts=make_prompts(25),
        entries={},
        layout=LAYOUT,
        bytes_per_token=PER_TOKEN,
        run=tmp_path / "run",
        dump_dirs=(tmp_path / "spool",),
        concurrency=4,
    )


def with_free(monkeypatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - free, free))


def two_disks(monkeypatch, job: Job) -> None:
    """Let the spool lie on a file system of its own."""
    monkeypatch.setattr(preflight, "_device", lambda folder: 2 if folder in job.dump_dirs else 1)


def entry(key: str, finished_at: float, *, num_tokens: int = 10, attempt: int = 100) -> LedgerEntry:
    return LedgerEntry(
        key=key, id=key, num_tokens=num_tokens, status=SampleStatus.DONE, attempt=attempt, finished_at=finished_at
    )


def test_dumps_that_are_renamed_into_the_run_are_counted_once(job):
    found = forecast(job)
    (space,) = found.spaces
    assert space.needed_bytes == sum(dump_bytes(p.num_tokens, PER_TOKEN) for p in job.prompts)
    assert (found.num_pending, found.pending_tokens) == (25, sum(p.num_tokens for p in job.prompts))
    assert found.pending_bytes == found.pending_tokens * PER_TOKEN
    assert found.faults == ()


def test_a_spool_on_another_disk_is_counted_there(job, monkeypatch):
    two_disks(monkeypatch, job)
    found = forecast(replace(job, spool_bytes=50_000))
    kept, spool = found.spaces
    assert (spool.folders, spool.needed_bytes) == ((str(job.dump_dirs[0]),), 50_000)
    assert kept.folders == (str(job.run),)


def test_the_spools_of_several_servers_on_one_disk_have_one_bound_together(job, monkeypatch, tmp_path):
    job = replace(job, dump_dirs=tuple(tmp_path / f"spool{number}" for number in range(8)), concurrency=4 * 8)
    two_disks(monkeypatch, job)
    found = forecast(replace(job, spool_bytes=50_000))
    _, spool = found.spaces
    assert (len(spool.folders), spool.needed_bytes) == (8, 50_000)
    free = dict.fromkeys(job.dump_dirs, 60_000) | {job.run: 10**9}
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: free[folder])
    check_room(job, forecast(job))  # half of what is free, by default


def test_one_step_needs_its_shards_and_the_spool_and_less_the_more_is_there(job, tmp_path):
    pack = PackOptions(dataset=tmp_path / "d", shard_size_bytes=40_960)
    job = replace(job, pack=pack, spool_bytes=30_000)
    found = forecast(job)
    (space,) = found.spaces
    assert space.needed_bytes == found.dataset_bytes + 30_000
    extract_one_step(job.run, job.prompts, FakeEngine(tmp_path / "spool"), pack)
    entries = {p.key: entry(p.key, 1.0) for p in job.prompts}
    (after,) = forecast(replace(job, entries=entries)).spaces
    assert after.needed_bytes == 0
    shards = list((tmp_path / "d/data").iterdir())
    assert found.num_shards == len(shards)
    assert found.dataset_bytes == sum(path.stat().st_size for path in shards)


def test_with_a_codec_a_shard_a_worker_is_needed_beside_the_coded_ones(job, tmp_path, monkeypatch):
    monkeypatch.setattr("eaglehs.builder.worker_count.worker_count", lambda asked: 2)
    plain = PackOptions(dataset=tmp_path / "d", shard_size_bytes=40_960)
    job = replace(job, spool_bytes=0)
    (space,) = forecast(replace(job, pack=plain)).spaces
    coded = replace(plain, codec=Codec.PLANES_ZSTD)
    (more,) = forecast(replace(job, pack=coded)).spaces
    assert 40_960 < more.needed_bytes - space.needed_bytes <= 2 * 40_960
    extract_one_step(job.run, job.prompts, FakeEngine(tmp_path / "spool"), coded)
    entries = {p.key: entry(p.key, 1.0) for p in job.prompts}
    (after,) = forecast(replace(job, pack=coded, entries=entries)).spaces
    assert after.needed_bytes == 0  # coded shards are smaller than planned, and nothing is missing


@pytest.mark.parametrize("is_packed", [True, False])
def test_what_does_not_fit_is_refused_with_all_three_numbers(is_packed, job, monkeypatch, tmp_path):
    if is_packed:
        job = replace(job, pack=PackOptions(dataset=tmp_path / "d"))
    needed = forecast(job).spaces[0].needed_bytes
    with_free(monkeypatch, 80_000)
    found = forecast(job)
    (space,) = found.spaces
    with pytest.raises(
        NoRoomError, match=r"will need [\d,]+ bytes .* 80,000 bytes .*free there: [\d,]+ bytes"
    ) as fault:
        check_room(job, found)
    assert f"{space.needed_bytes - 80_000:,} bytes" in str(fault.value)
    assert found.faults == (str(fault.value),)
    with_free(monkeypatch, needed)
    check_room(job, forecast(job))


def test_a_prompt_that_never_fits_the_spool_is_refused_and_one_that_fits_alone_is_not(job, monkeypatch):
    two_disks(monkeypatch, job)
    long = make_prompt("long", 400)
    job = replace(job, prompts=[*job.prompts, long], spool_bytes=20_000)
    size = dump_bytes(400, PER_TOKEN)
    free = {job.dump_dirs[0]: size, job.run: 10**9}
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: free[folder])
    check_room(job, forecast(job))
    free[job.dump_dirs[0]] = size - 1
    with pytest.raises(SpoolTooSmallError, match=f"long needs {size:,} bytes of dumps, {size - 1:,} bytes are free"):
        check_room(job, forecast(job))


def test_where_finished_shards_are_sent_away_room_for_three_is_enough_and_what_was_sent_is_done(job, tmp_path):
    kept = PackOptions(dataset=tmp_path / "dataset", shard_size_bytes=20_480)
    drained = replace(kept, is_drained=True)
    whole = forecast(replace(job, pack=kept, spool_bytes=0))
    assert whole.num_shards > 3
    most = forecast(replace(job, pack=drained, spool_bytes=0)).spaces[0].needed_bytes
    assert most < whole.spaces[0].needed_bytes
    folder = DatasetFolder(kept.dataset)
    (folder.index.parent / ".pack").mkdir(parents=True)
    folder.data.mkdir()
    for number in range(whole.num_shards - 1):
        entry = ShardEntry(name=shard_name(number), num_samples=1, num_tokens=1, size_bytes=1, sha256="0" * 64)
        PushedShards(folder).delete_local(entry, "org/name")
    assert forecast(replace(job, pack=drained, spool_bytes=0)).spaces[0].needed_bytes < most


def test_a_finished_run_needs_no_room(job, monkeypatch):
    with_free(monkeypatch, 0)
    done = replace(job, entries={p.key: entry(p.key, 1.0) for p in job.prompts})
    check_room(done, forecast(done))


def test_a_default_spool_leaves_the_shards_their_room(job, monkeypatch, tmp_path):
    job = replace(job, pack=PackOptions(dataset=tmp_path / "d", shard_size_bytes=40_960), concurrency=100)
    shards = forecast(job).dataset_bytes
    largest = max(dump_bytes(p.num_tokens, PER_TOKEN) for p in job.prompts)
    with_free(monkeypatch, shards + largest + 5)
    found = forecast(job)
    assert found.spool_bytes == largest + 5
    check_room(job, found)


def test_prompts_and_shards_that_no_reader_takes_are_refused(job, tmp_path):
    wide = replace(job, layout=replace(LAYOUT, hidden_size=400_000_000))
    with pytest.raises(SampleTooLongError, match="--max-tokens"):
        forecast(wide)
    with pytest.raises(UsageError, match="50 GB"):
        forecast(replace(job, pack=PackOptions(dataset=tmp_path / "d", shard_size_bytes=60 * 1000**3)))
    warned = forecast(replace(job, pack=PackOptions(dataset=tmp_path / "d", shard_size_bytes=10_240)))
    assert any("has data/train-" in warning for warning in warned.warnings)


def test_the_rate_is_that_of_the_last_start_and_the_time_follows(job):
    entries = [
        entry("a", 100.0, attempt=100),
        entry("b", 1000.0, attempt=100),
        entry("c", 5000.0, attempt=200),
        entry("d", 5002.0, attempt=201, num_tokens=30),
        entry("e", 5004.0, attempt=200, num_tokens=50),
    ]
    assert measured_rate(entries) == 20.0
    assert measured_rate(entries[:1]) is None
    assert measured_rate([replace(one, finished_at=0.0) for one in entries]) is None
    found = forecast(replace(job, rate=50.0))
    assert found.seconds == found.pending_tokens / 50
    assert forecast(job).seconds is None
