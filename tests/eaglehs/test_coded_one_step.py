"""`extract --pack --codec`: the bytes of `extract` and `pack --codec`, whatever fails, stops or comes first."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder import one_step, pack_state, shard_coder
from eaglehs.builder.read_back import ShardReadBackError
from eaglehs.builder.shard_seal import ShardSealer
from eaglehs.builder.verify import verify_dataset, verify_run
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.errors import EngineError, UsageError
from eaglehs.schemas.ledger import SampleStatus, read_ledger
from eaglehs.schemas.run import RunRecord
from eaglehs.schemas.states import Codec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eaglehs.packing_keeper import PackOptions, check_same_packing
from tests.factories.coded import small_blocks
from tests.factories.extractions import dataset_bytes, extract_one_step, extract_two_steps, record_of
from tests.factories.prompts import make_prompt, make_prompts
from tests.fakes.engine import FakeEngine

SIZE = 40_960
PLANES = Codec.PLANES_ZSTD


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(tmp_path / "spool")


@pytest.fixture
def options(tmp_path: Path) -> PackOptions:
    return PackOptions(dataset=tmp_path / "one", shard_size_bytes=SIZE, codec=PLANES)


def refuse(prompt, number, answer):
    return replace(answer, cached_tokens=1)


def unbroken(folder: Path, prompts, options: PackOptions, failing=()) -> dict[str, bytes]:
    """Return the dataset of the same work in two steps."""
    engine = FakeEngine(folder / "two-spool")
    engine.faults = dict.fromkeys(failing, refuse)
    two = replace(options, dataset=folder / "two")
    extract_two_steps(folder / "two-run", prompts, engine, two, max_failed=99)
    return dataset_bytes(folder / "two")


def done_keys(run: Path) -> set[str]:
    return {entry.key for entry in read_ledger(run / "ledger.jsonl") if entry.status is SampleStatus.DONE}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=14),
    shard_size=st.sampled_from([10_240, 20_480, 40_960, 10**6]),
    shuffle=st.sampled_from([None, 1, 7]),
    concurrency=st.integers(1, 5),
    data=st.data(),
)
def test_one_step_gives_the_bytes_of_two_steps(lengths, shard_size, shuffle, concurrency, data):
    prompts = [make_prompt(f"p{number}", n, seed=5) for number, n in enumerate(lengths)]
    failing = data.draw(st.sets(st.sampled_from([p.key for p in prompts]), max_size=len(prompts) - 1))
    with tempfile.TemporaryDirectory() as place, small_blocks():
        folder = Path(place)
        options = PackOptions(dataset=folder / "one", shard_size_bytes=shard_size, shuffle_seed=shuffle, codec=PLANES)
        engine = FakeEngine(folder / "spool", concurrency=concurrency)
        engine.faults = dict.fromkeys(failing, refuse)
        extract_one_step(folder / "run", prompts, engine, options, max_failed=99)
        assert dataset_bytes(folder / "one") == unbroken(folder, prompts, options, failing)
        assert verify_dataset(folder / "one").is_good
        assert not list((folder / "one").rglob("*.part"))


@pytest.mark.parametrize("stop_at", ["p000", "p007", "p016", "p024"])
def test_a_run_that_stops_is_taken_up_without_computing_a_finished_sample_again(stop_at, engine, options, tmp_path):
    prompts = make_prompts(25)

    def die(prompt, number, answer):
        raise EngineError("the server is gone")

    engine.faults[stop_at] = die
    with pytest.raises(EngineError):
        extract_one_step(tmp_path / "run", prompts, engine, options)
    kept = done_keys(tmp_path / "run")
    engine.faults.clear()
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert set(engine.asked) == {prompt.key for prompt in prompts} - kept
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


def test_samples_that_failed_are_put_back_into_their_shard_which_is_decoded_for_it(engine, options, tmp_path):
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


@pytest.mark.parametrize("moment", ["while it recodes", "before its record", "after its record"])
def test_a_stop_at_any_moment_of_a_sealing_loses_no_sample(moment, engine, options, tmp_path, monkeypatch):
    prompts = make_prompts(25)
    engine.concurrency = 1
    place, name = {
        "while it recodes": (shard_coder, "write_state"),
        "before its record": (pack_state.PackState, "keep"),
        "after its record": (ShardSealer, "tidy"),
    }[moment]
    real, calls = getattr(place, name), []

    def stop(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(place, name, stop)
    with pytest.raises(KeyboardInterrupt):
        extract_one_step(tmp_path / "run", prompts, engine, options)
    monkeypatch.undo()
    kept = done_keys(tmp_path / "run")
    assert kept
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert set(engine.asked) == {prompt.key for prompt in prompts} - kept
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)
    assert not list(options.dataset.rglob("*.part"))


@pytest.mark.parametrize("lost", ["file", "record", "cut"])
def test_a_lost_shard_is_computed_again_and_a_lost_record_is_not(lost, engine, options, tmp_path):
    prompts = make_prompts(25)
    extract_one_step(tmp_path / "run", prompts, engine, options)
    shard = options.dataset / "data/train-00001.tar"
    in_shard = {e.key for e in read_ledger(tmp_path / "run/ledger.jsonl") if e.shard == "data/train-00001.tar"}
    if lost == "file":
        shard.unlink()
    elif lost == "record":
        (options.dataset / "_index/.pack/train-00001.parquet").unlink()
    else:
        os.truncate(shard, 700)
    engine.asked.clear()
    extract_one_step(tmp_path / "run", prompts, engine, options)
    assert set(engine.asked) == (set() if lost == "record" else in_shard)
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)


def test_a_part_that_rots_before_it_is_recoded_is_named_and_its_sample_computed_again(
    engine, options, tmp_path, monkeypatch
):
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


def test_verify_finds_the_samples_of_such_a_run_in_parts_and_in_coded_shards(engine, options, tmp_path):
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
    content = shard.read_bytes()
    at = content.index(b"EHPLANES") + 60
    shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert any("layer_1 of sample p000: block 0" in str(fault) for fault in verify_run(tmp_path / "run").faults)


def test_run_json_keeps_the_codec_and_another_one_is_refused(engine, options, tmp_path):
    prompts = make_prompts(3)
    extract_one_step(tmp_path / "run", prompts, engine, options)
    text = (tmp_path / "run/run.json").read_text()
    assert '"codec": "planes-zstd"' in text
    assert '"version": 2' in text
    record = read_record(RunRecord, tmp_path / "run/run.json")
    check_same_packing(record, options, tmp_path)
    with pytest.raises(UsageError, match="--shard-size 40960 --codec planes-zstd"):
        check_same_packing(record, replace(options, codec=Codec.PLAIN), tmp_path)
    with pytest.raises(UsageError, match="is packed into"):
        check_same_packing(record_of(prompts, replace(options, codec=Codec.PLAIN)), options, tmp_path)
