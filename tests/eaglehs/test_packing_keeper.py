"""One step and two give the same bytes, whatever fails, stops or comes first; no sample is lost or doubled."""

import asyncio
import errno
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder import one_step, shard_parts
from eaglehs.builder.index_store import read_index
from eaglehs.builder.pack import PackedAlreadyError, PackSettings, pack_run
from eaglehs.builder.read_back import ShardReadBackError
from eaglehs.builder.verify import verify_dataset, verify_run
from eaglehs.schemas.errors import DataError, EngineError, StorageError, UsageError
from eaglehs.schemas.ledger import SampleStatus, read_ledger
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.states import Codec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eaglehs.packing_keeper import PackOptions, check_same_packing
from tests.factories.extractions import dataset_bytes, extract_one_step, extract_two_steps, record_of
from tests.factories.prompts import make_prompt, make_prompts
from tests.fakes.engine import FakeEngine

SIZE = 40_960


class ShuffledEngine(FakeEngine):
    """Answers in another order than it was asked, by a seed."""

    seed = 0

    async def capture(self, prompt, rid):
        for _ in range(random.Random(f"{self.seed}{rid}").randrange(12)):
            await asyncio.sleep(0)
        return await super().capture(prompt, rid)


@pytest.fixture
def engine(tmp_path) -> ShuffledEngine:
    return ShuffledEngine(tmp_path / "spool")


@pytest.fixture(params=Codec)
def options(tmp_path, request) -> PackOptions:
    return PackOptions(dataset=tmp_path / "one", shard_size_bytes=SIZE, codec=request.param)


def refuse(prompt, number, answer):
    return replace(answer, cached_tokens=1)


def unbroken(folder: Path, prompts, options: PackOptions, failing=()) -> dict[str, bytes]:
    """Return the dataset of the same work in two steps."""
    engine = FakeEngine(folder / "two-spool")
    engine.faults = dict.fromkeys(failing, refuse)
    two = replace(options, dataset=folder / "two")
    extract_two_steps(folder / "two-run", prompts, engine, two, max_failed=99)
    return dataset_bytes(folder / "two")


def done_keys(run: Path) -> list[str]:
    return [entry.key for entry in read_ledger(run / "ledger.jsonl") if entry.status is SampleStatus.DONE]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=14),
    shard_size=st.sampled_from([10_240, 20_480, 40_960, 10**6]),
    shuffle=st.sampled_from([None, 1, 7]),
    multiple=st.sampled_from([1, 2]),
    codec=st.sampled_from(Codec),
    concurrency=st.integers(1, 5),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_one_step_gives_the_bytes_of_two_steps(lengths, shard_size, shuffle, multiple, codec, concurrency, seed, data):
    prompts = [make_prompt(f"p{number}", n, seed=seed) for number, n in enumerate(lengths)]
    failing = data.draw(st.sets(st.sampled_from([p.key for p in prompts]), max_size=len(prompts) - 1))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        options = PackOptions(
            dataset=folder / "one",
            shard_size_bytes=shard_size,
            shuffle_seed=shuffle,
            shard_multiple=multiple if shard_size == 10**6 and len(prompts) > 1 else 1,
            codec=codec,
        )
        engine = ShuffledEngine(folder / "spool", concurrency=concurrency)
        engine.seed, engine.faults = seed, dict.fromkeys(failing, refuse)
        extract_one_step(folder / "run", prompts, engine, options, max_failed=99)
        assert dataset_bytes(folder / "one") == unbroken(folder, prompts, options, failing)
        assert list((folder / "spool").iterdir()) == []
        assert not list((folder / "one").rglob("*.part"))


def test_a_dataset_made_in_one_step_verifies_and_leaves_no_dump(engine, options, tmp_path):
    extract_one_step(tmp_path / "run", make_prompts(25), engine, options)
    assert verify_dataset(options.dataset).faults == ()
    assert not list(tmp_path.rglob("*.pt"))
    assert not list(tmp_path.rglob(".*.part"))


def test_a_shard_has_its_name_as_soon_as_its_last_sample_is_kept(engine, options, tmp_path):
    prompts = make_prompts(25)
    engine.concurrency = 1
    seen = []

    def look(prompt, number, answer):
        seen.append({path.name for path in options.dataset.glob("data/*.tar")})
        return answer

    engine.faults[prompts[-1].key] = look
    extract_one_step(tmp_path / "run", prompts, engine, options)
    names = sorted(path.name for path in options.dataset.glob("data/*.tar"))
    assert sorted(seen[0]) == names[:-1]
    assert not (options.dataset / "data" / ".train-00000.tar.part").exists()


@pytest.mark.parametrize("stop_at", ["p000", "p007", "p016", "p024"])
def test_a_run_that_stops_is_taken_up_without_computing_a_finished_sample_again(stop_at, engine, options, tmp_path):
    prompts = make_prompts(25)

    def die(prompt, number, answer):
        raise EngineError("the server is gone")

    engine.faults[stop_at] = die
    with pytest.raises(EngineError):
        extract_one_step(tmp_path / "run", prompts, engine, options)
    assert not (options.dataset / "manifest.json").exists()
    kept = set(done_keys(tmp_path / "run"))
    engine.faults.clear()
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert set(engine.asked) == {prompt.key for prompt in prompts} - kept
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


def test_a_finished_run_touches_nothing(engine, options, tmp_path):
    prompts = make_prompts(12)
    extract_one_step(tmp_path / "run", prompts, engine, options)
    before = {path: path.stat().st_mtime_ns for path in options.dataset.rglob("*") if path.name != ".lock"}
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert not engine.asked
    assert {path: path.stat().st_mtime_ns for path in options.dataset.rglob("*") if path.name != ".lock"} == before


def test_samples_that_failed_are_put_back_into_their_shard_by_a_later_start(engine, options, tmp_path):
    prompts = make_prompts(25)
    failing = ["p003", "p004", "p019"]
    engine.faults = dict.fromkeys(failing, refuse)
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert verify_dataset(options.dataset).faults == ()
    engine.faults.clear()
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert set(engine.asked) == set(failing)
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


@pytest.mark.parametrize("lost", ["file", "record", "file and record", "all shards", "cut"])
def test_a_lost_shard_is_computed_again_and_a_lost_record_is_not(lost, engine, options, tmp_path):
    prompts = make_prompts(25)
    extract_one_step(tmp_path / "run", prompts, engine, options)
    shard = options.dataset / "data/train-00001.tar"
    in_shard = {e.key for e in read_ledger(tmp_path / "run/ledger.jsonl") if e.shard == "data/train-00001.tar"}
    if "file" in lost:
        shard.unlink()
    if "record" in lost:
        (options.dataset / "_index/.pack/train-00001.parquet").unlink()
    if lost == "all shards":
        for path in options.dataset.glob("data/*.tar"):
            path.unlink()
    if lost == "cut":
        os.truncate(shard, 700)
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    everything = {prompt.key for prompt in prompts}
    assert set(engine.asked) == {"record": set(), "all shards": everything}.get(lost, in_shard)
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


def test_a_stale_place_in_a_part_never_counts(engine, options, tmp_path, monkeypatch):
    """A sample is lost, and the next attempt is cut off while it is written: meta.json is whole, the states are not."""
    prompts = make_prompts(25)
    extract_one_step(tmp_path / "run", prompts, engine, options)
    (options.dataset / "data/train-00000.tar").unlink()
    real = shard_parts.ShardWriter.write_sample

    def cut(writer, placed, meta, arrays):
        real(writer, placed, meta, arrays)
        os.pwrite(writer._out, b"\0" * 64, placed.members[-1].data_offset)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("eaglehs.builder.tar_writer.ShardWriter.write_sample", cut)
    with pytest.raises(StorageError, match="Input/output error"):
        extract_one_step(tmp_path / "run", prompts, engine, options)
    monkeypatch.undo()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


def test_a_full_disk_in_mid_shard_says_the_numbers_and_a_rerun_goes_on(engine, options, tmp_path, monkeypatch):
    prompts = make_prompts(25)
    calls = []

    def full(handle):
        calls.append(handle)
        if len(calls) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle)

    real = os.fdatasync
    monkeypatch.setattr(one_step.os, "fdatasync", full)
    with pytest.raises(StorageError, match=r"p\d+ \([\d,]+ bytes\) can't be written .*No space left.* are free"):
        extract_one_step(tmp_path / "run", prompts, engine, options)
    monkeypatch.undo()
    kept = done_keys(tmp_path / "run")
    assert len(kept) == 9
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert not set(engine.asked) & set(kept)
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


def test_a_dump_that_changes_after_its_check_is_asked_again(engine, options, tmp_path, monkeypatch):
    real, broken = one_step.write_sample, []

    def change_one(writer, placed, meta, prompt, dumps):
        if placed.key == "p005" and not broken:
            broken.append(placed.key)
            with dumps[0].path.open("r+b") as dump:
                dump.seek(dumps[0].arrays["final"].offset)
                dump.write(b"\xff\x00")
        real(writer, placed, meta, prompt, dumps)

    monkeypatch.setattr(one_step, "write_sample", change_one)
    prompts = make_prompts(12)
    outcome = extract_one_step(tmp_path / "run", prompts, engine, options)
    assert (outcome.num_done, engine.asked["p005"]) == (12, 2)
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


def test_bytes_that_rot_before_the_shard_is_sealed_are_named_and_computed_again(engine, options, tmp_path, monkeypatch):
    prompts = make_prompts(6)
    big = replace(options, shard_size_bytes=10**6)
    real = one_step.OneStep.kept

    def rot(self, key):
        if key == "p002":
            shard, placed = self._places[key]
            with self._parts.path(shard).open("r+b") as part:
                os.pwrite(part.fileno(), b"\xff\x00", placed.members[-1].data_offset)
        real(self, key)

    monkeypatch.setattr(one_step.OneStep, "kept", rot)
    with pytest.raises(ShardReadBackError, match="final of p002 reads back other bytes"):
        extract_one_step(tmp_path / "run", prompts, engine, big)
    monkeypatch.undo()
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, big)
    assert set(engine.asked) == {"p002"}
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, big)


def test_packing_a_run_that_was_packed_in_one_step_says_where_it_is(engine, options, tmp_path):
    prompts = make_prompts(5)
    extract_one_step(tmp_path / "run", prompts, engine, options)
    with pytest.raises(PackedAlreadyError, match=f"packed already .*{options.dataset}; it is finished"):
        pack_run(tmp_path / "run", tmp_path / "other", PackSettings(), Silent())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_size_bytes": 99_999}, "--shard-size 40960"),
        ({"shuffle_seed": 3}, "is packed into"),
        ({"shard_multiple": 2}, "is packed into"),
        ({"dataset": Path("/elsewhere")}, "is packed into"),
    ],
)
def test_a_run_is_never_gone_on_with_by_another_plan(change, message, options, tmp_path):
    record = record_of(make_prompts(3), options)
    check_same_packing(record, options, tmp_path)
    with pytest.raises(UsageError, match=message):
        check_same_packing(record, replace(options, **change), tmp_path)
    with pytest.raises(UsageError, match="is packed into"):
        check_same_packing(record, None, tmp_path)
    with pytest.raises(UsageError, match="begun without --pack"):
        check_same_packing(record_of(make_prompts(3)), options, tmp_path)


def test_a_dataset_of_which_every_sample_failed_is_refused(engine, options, tmp_path):
    prompts = make_prompts(3)
    engine.faults = {prompt.key: refuse for prompt in prompts}
    with pytest.raises(DataError, match="0 of 3 samples"):
        extract_one_step(tmp_path / "run", prompts, engine, options)


def test_verify_finds_the_samples_of_such_a_run_in_its_shards(engine, options, tmp_path):
    prompts = make_prompts(12)
    engine.faults["p009"] = lambda prompt, number, answer: (_ for _ in ()).throw(EngineError("gone"))
    with pytest.raises(EngineError):
        extract_one_step(tmp_path / "run", prompts, engine, options)
    half = verify_run(tmp_path / "run")
    assert (half.faults, half.num_samples) == ((), len(done_keys(tmp_path / "run")))
    engine.faults.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    whole = verify_run(tmp_path / "run")
    assert (whole.faults, whole.num_samples) == ((), 12)
    shard = options.dataset / "data/train-00000.tar"
    first = next(iter(read_index(options.dataset / "_index/samples.parquet")))
    with shard.open("r+b") as file:
        file.seek(first.arrays["final"].offset + first.arrays["final"].stored_bytes - 2)
        file.write(b"\xff\xff")
    told = "has hash" if options.codec is Codec.PLAIN else "final of sample p000: block 0"
    assert any(told in str(fault) for fault in verify_run(tmp_path / "run").faults)
    shard.unlink()
    lost = verify_run(tmp_path / "run").faults
    assert lost
    assert all("is not in" in str(fault) for fault in lost)
