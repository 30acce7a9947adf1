"""What `extract --pack --codec` adds to one step: a stop may come while a shard is recoded, the run keeps the codec.

All else that one step promises is tested with and without a codec in test_packing_keeper.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder import pack_state, shard_coder
from eaglehs.builder.shard_seal import ShardSealer
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.run import RunRecord
from eaglehs.schemas.states import Codec

from eaglehs.packing_keeper import PackOptions, check_same_packing
from tests.eaglehs.test_packing_keeper import done_keys, unbroken
from tests.factories.extractions import dataset_bytes, extract_one_step, record_of
from tests.factories.prompts import make_prompts
from tests.fakes.engine import FakeEngine

SIZE = 40_960
PLANES = Codec.PLANES_ZSTD


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(tmp_path / "spool")


@pytest.fixture
def options(tmp_path: Path) -> PackOptions:
    return PackOptions(dataset=tmp_path / "one", shard_size_bytes=SIZE, codec=PLANES)


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
    assert set(engine.asked) == {prompt.key for prompt in prompts}.difference(kept)
    assert dataset_bytes(options.dataset) == unbroken(tmp_path, prompts, options)
    assert not list(options.dataset.rglob("*.part"))


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
