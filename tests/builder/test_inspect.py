"""Inspect: the numbers of a run and of its dataset agree with what was made."""

from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.builder.inspect import UnknownSampleError, inspect_path, inspect_sample
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.progress import Silent

from tests.factories.datasets import make_dataset
from tests.factories.runs import change_record, make_run


def test_a_run_and_its_dataset_have_the_same_numbers(tmp_path: Path):
    dataset = make_dataset(tmp_path, lengths=(5, 12, 33, 4), failed={"p1": "p1: rows 0..3 of 12 are missing. X."})
    run, packed = inspect_path(dataset.run.root), inspect_path(dataset.root)
    assert (run.kind, packed.kind) == ("run", "dataset")
    for one in (run, packed):
        assert (one.num_samples, one.num_planned, one.num_tokens) == (3, 4, 42)
        assert one.num_trainable == sum(dataset.run.prompt(key).loss_mask.sum() for key in ("p0", "p2", "p3"))
        assert (one.layers, one.capture, one.failed) == ((2, 5, 9), "layer_input", {"rows N of N are missing": 1})
        assert (one.lengths.shortest, one.lengths.median, one.lengths.longest) == (4, 5, 33)
    assert packed.size_bytes == sum(path.stat().st_size for path in dataset.shards)
    assert run.size_bytes == sum(path.stat().st_size for path in (dataset.run.root / "dumps").rglob("*.pt"))


def test_rows_that_were_left_out_are_counted_by_reason_in_both(tmp_path: Path):
    run = make_run(tmp_path / "run")
    skipped = {"duplicate": 3, "too long": 1}
    change_record(run, prompts=replace(run.record.prompts, skipped=skipped))
    pack_run(run.root, tmp_path / "dataset", PackSettings(), Silent())
    assert inspect_path(run.root).skipped == skipped
    assert inspect_path(tmp_path / "dataset").skipped == skipped


def test_a_sample_is_found_by_key_in_both(tmp_path: Path):
    dataset = make_dataset(tmp_path, chunk_rows=8)
    in_run, packed = inspect_sample(dataset.run.root, "p1"), inspect_sample(dataset.root, "p1")
    assert (in_run.status, len(in_run.dumps), in_run.shard) == ("done", 2, "")
    assert (packed.status, packed.dumps, packed.num_tokens) == ("packed", (), 12)
    place = packed.arrays["layer_5"]
    raw = dataset.folder.shard(packed.shard).read_bytes()
    assert raw[place.offset : place.offset + place.length] == dataset.bits("p1")["layer_5"].tobytes()


def test_a_sample_is_found_by_the_users_id(tmp_path: Path):
    from tests.factories.dumps import make_prompt
    from tests.factories.runs import make_run_of

    run = make_run_of(tmp_path / "run", [make_prompt("a-1", 4, sample_id="A/1")])
    pack_run(run.root, tmp_path / "d", PackSettings(), Silent())
    assert inspect_sample(run.root, "A/1").key == "a-1"
    assert inspect_sample(tmp_path / "d", "A/1").key == "a-1"


def test_samples_that_are_not_done_say_why(tmp_path: Path):
    run = make_run(tmp_path, failed={"p0": "p0: no answer"}, unfinished=["p1"])
    assert inspect_sample(run.root, "p0").reason == "p0: no answer"
    assert inspect_sample(run.root, "p1").status == "not extracted yet"
    assert inspect_path(run.root).num_samples == 1


def test_an_unknown_sample_or_folder_is_an_error_of_usage(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    for path in (dataset.root, dataset.run.root):
        with pytest.raises(UnknownSampleError, match="no sample with key or id 'zz'"):
            inspect_sample(path, "zz")
    with pytest.raises(UsageError, match="neither a run nor a dataset"):
        inspect_path(tmp_path)


def test_a_run_without_a_finished_sample_has_no_lengths(tmp_path: Path):
    run = make_run(tmp_path, unfinished=["p0", "p1", "p2"])
    assert inspect_path(run.root).lengths is None
