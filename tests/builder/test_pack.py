"""Pack: whatever the samples, sizes and workers, a tar reader finds the source bits, and equal input is equal bytes."""

import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eaglehs.builder.index_store import read_index
from eaglehs.builder.pack import NothingToPackError
from eaglehs.builder.run_reader import UnfinishedRunError, read_run_record
from eaglehs.builder.verify import verify_dataset
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import read_record, write_record
from eaglehs.schemas.manifest import DatasetFolder, Manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.dumps import make_states
from tests.factories.packed import SIZE, check_bits, files, members, pack
from tests.factories.packing import pack_by_hand
from tests.factories.runs import change_record, finish_sample, make_run, relist


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    chunk_rows=st.sampled_from([None, 1, 16, 64]),
    shard_size=st.integers(1, 200_000),
    workers=st.integers(1, 4),
    seed=st.none() | st.integers(0, 3),
)
@settings(max_examples=15)
def test_any_run_packs_to_shards_that_hold_the_source_bits(
    tmp_path_factory, lengths, chunk_rows, shard_size, workers, seed
):
    root = tmp_path_factory.mktemp("pack")
    run = make_run(root / "run", lengths=lengths, chunk_rows=chunk_rows)
    summary = pack(run, root / "dataset", shard_size_bytes=shard_size, workers=workers, shuffle_seed=seed)
    check_bits(run, root / "dataset", [prompt.key for prompt in run.prompts])
    assert summary.totals.num_tokens == sum(lengths)
    assert verify_dataset(root / "dataset").faults == ()


def test_shards_are_those_that_the_formats_step_by_step_give(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(5, 12, 33, 200), chunk_rows=16)
    pack(run, tmp_path / "a")
    pack_by_hand(run, tmp_path / "b", SIZE)
    ours, by_hand = files(tmp_path / "a"), files(tmp_path / "b")
    assert {name: sha for name, sha in ours.items() if name.startswith("data/")} == {
        name: sha for name, sha in by_hand.items() if name.startswith("data/")
    }
    rows = list(read_index(DatasetFolder(tmp_path / "a").index))
    assert rows == list(read_index(DatasetFolder(tmp_path / "b").index))


def test_wide_states_of_more_than_1_mib_are_padded_and_exact(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(100, 90), hidden_size=7168, chunk_rows=64, layers=(3, 31))
    pack(run, tmp_path / "d", shard_size_bytes=10**8)
    check_bits(run, tmp_path / "d", ["p0", "p1"])
    with tarfile.open(tmp_path / "d/data/train-00000.tar") as tar:
        ends = [(m.offset_data + m.size - 512) % 10_240 for m in tar if "layer" in m.name or "final" in m.name]
    assert ends.count(0) >= 5


def test_any_number_of_workers_gives_the_same_bytes_at_any_time(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run", lengths=range(1, 40), chunk_rows=16)
    pack(run, tmp_path / "one")
    monkeypatch.setattr("time.time", lambda: 4e9)
    summary = pack(run, tmp_path / "four", workers=4)
    assert summary.num_shards > 5
    assert files(tmp_path / "one") == files(tmp_path / "four")


def test_every_bit_pattern_of_finite_values_survives(tmp_path: Path):
    values = [70000.0, 1e30, -0.0, 1e-40, -1e-40, 3.3895e38, 1.0]
    run = make_run(tmp_path / "run", lengths=(8,), unfinished=["p0"])
    states = run.states("p0")
    for state in states.values():
        state[3, : len(values)] = torch.tensor(values).to(torch.bfloat16)
    run.states = lambda key: states  # type: ignore[method-assign]
    finish_sample(run, run.prompts[0])
    pack(run, tmp_path / "d")
    check_bits(run, tmp_path / "d", ["p0"])


def test_the_manifest_says_what_a_trainer_needs(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(5, 12, 33), failed={"p1": "p1: rows 0..4 of 12 are missing. So."})
    pack(run, tmp_path / "d", shuffle_seed=3)
    manifest = read_record(Manifest, DatasetFolder(tmp_path / "d").manifest)
    assert manifest.failed == {"rows N of N are missing": 1}
    assert manifest.totals.num_samples == 2
    assert manifest.totals.num_tokens == 38
    assert manifest.totals.num_trainable == sum(run.prompt(key).loss_mask.sum() for key in ("p0", "p2"))
    assert manifest.totals.size_bytes == sum(path.stat().st_size for path in (tmp_path / "d/data").iterdir())
    assert (manifest.shuffle_seed, manifest.shard_size_bytes) == (3, SIZE)
    assert (manifest.model, manifest.layers, manifest.run_id) == (
        run.record.model,
        run.record.layers,
        run.record.run_id,
    )
    for entry in manifest.shards:
        assert entry.sha256 == hashlib.sha256((tmp_path / "d" / entry.name).read_bytes()).hexdigest()
    norms = [
        sum(make_states(key, n)[state].to(torch.float64).norm(dim=1).sum().item() for key, n in (("p0", 5), ("p2", 33)))
        for state in ("layer_2", "final")
    ]
    assert manifest.state_norms["layer_2"] == pytest.approx(norms[0] / 38, rel=1e-9)
    assert manifest.state_norms["final"] == pytest.approx(norms[1] / 38, rel=1e-9)


def test_what_is_packed_tells_nothing_of_the_machine_but_the_run_can_be_gone_on_with(tmp_path: Path):
    """By every byte of every file that a push sends; the shards are those of any other machine."""
    run = make_run(tmp_path / "run", lengths=[12] * 3, failed={"p1": "p1: /home/alice/x can't be read"})
    pack(run, tmp_path / "other")
    record = run.record
    command = ("/home/alice/venv/bin/python", "-m", "sglang.launch_server", "--model-path", "/home/alice/tiny")
    change_record(
        run,
        model=replace(record.model, name="/home/alice/tiny", revision="local-0123456789abcdef"),
        prompts=replace(record.prompts, source="/home/alice/prompts:train"),
        engine=replace(record.engine, command=command, environment={"SGLANG_HS_DUMP_DIR": "/home/alice/dumps"}),
        command=("/home/alice/venv/bin/eaglehs", "extract"),
        settings={"dump_dir": "/home/alice/dumps"},
    )
    pack(run, tmp_path / "d")
    write_card(tmp_path / "d")
    published = [path for path in (tmp_path / "d").rglob("*") if path.is_file() and ".pack" not in path.parts]
    assert {"README.md", "manifest.json", "samples.parquet", "train-00000.tar"} <= {path.name for path in published}
    assert not [path for path in published if b"alice" in path.read_bytes()]
    manifest = read_record(Manifest, DatasetFolder(tmp_path / "d").manifest)
    assert (manifest.model.name, manifest.model.revision) == ("tiny", "local-0123456789abcdef")
    assert read_run_record(run.root).model.name == "/home/alice/tiny"
    ours, others = files(tmp_path / "d"), files(tmp_path / "other")
    assert {n: h for n, h in ours.items() if n.startswith("data/")} == {
        n: h for n, h in others.items() if n.startswith("data/")
    }


def test_a_manifest_with_paths_of_an_earlier_version_is_written_anew_and_the_shards_stay(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 9)
    pack(run, tmp_path / "d")
    before, folder = files(tmp_path / "d"), DatasetFolder(tmp_path / "d")
    manifest = read_record(Manifest, folder.manifest)
    write_record(folder.manifest, replace(manifest, prompts=replace(manifest.prompts, source="/home/alice/p.jsonl")))
    summary = pack(run, tmp_path / "d")
    assert (summary.num_reused, summary.is_unchanged) == (len(manifest.shards), False)
    assert files(tmp_path / "d") == before


def test_a_failed_sample_is_left_out_of_its_own_shard_only(tmp_path: Path):
    lengths = [12] * 9
    whole = make_run(tmp_path / "whole", lengths=lengths)
    partly = make_run(tmp_path / "partly", lengths=lengths, failed={"p4": "p4: x"})
    pack(whole, tmp_path / "a")
    pack(partly, tmp_path / "b")
    ours, others = files(tmp_path / "b"), files(tmp_path / "a")
    changed = {name for name in others if name.startswith("data/") and ours[name] != others[name]}
    [row] = [row for row in read_index(DatasetFolder(tmp_path / "a").index) if row.key == "p4"]
    assert changed == {row.shard}
    check_bits(partly, tmp_path / "b", [f"p{i}" for i in range(9) if i != 4])


def test_a_sample_that_is_finished_later_changes_its_shard_only(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 9, failed={"p4": "p4: x"})
    first = pack(run, tmp_path / "d")
    finish_sample(run, run.prompt("p4"))
    again = pack(run, tmp_path / "d")
    assert again.num_reused == first.num_shards - 1
    assert again.failed == {}
    check_bits(run, tmp_path / "d", [f"p{i}" for i in range(9)])


def test_a_shard_of_failed_samples_alone_is_left_out_and_the_others_keep_their_names(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(200, 200, 200), failed={"p1": "p1: x"})
    pack(run, tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d/data").iterdir()) == ["train-00000.tar", "train-00002.tar"]
    assert verify_dataset(tmp_path / "d").is_good


def test_an_unfinished_run_is_packed_only_when_asked_for(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(5, 6, 7), unfinished=["p1"])
    with pytest.raises(UnfinishedRunError, match="--partial"):
        pack(run, tmp_path / "d")
    assert not (tmp_path / "d").exists()
    summary = pack(run, tmp_path / "d", allow_partial=True)
    assert summary.failed == {"not extracted yet": 1}
    check_bits(run, tmp_path / "d", ["p0", "p2"])


@pytest.mark.parametrize("options", [{"unfinished": ["p0"]}, {"failed": {"p0": "p0: no"}}])
def test_nothing_to_pack_is_an_error_with_no_file_left(tmp_path: Path, options):
    run = make_run(tmp_path / "run", lengths=(5,), **options)
    with pytest.raises(NothingToPackError):
        pack(run, tmp_path / "d", allow_partial=True)
    assert not (tmp_path / "d").exists()


def test_a_run_whose_dumps_are_all_bad_leaves_no_file(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(5, 6))
    for key in ("p0", "p1"):
        run.dumps_of(key)[0].write_bytes(b"PK")
    with pytest.raises(NothingToPackError, match="2 x"):
        pack(run, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_exactly_one_sample_is_one_shard(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(1,))
    assert pack(run, tmp_path / "d").num_shards == 1
    check_bits(run, tmp_path / "d", ["p0"])


def test_ids_that_are_no_keys_come_back_in_meta_and_index(tmp_path: Path):
    from eaglehs.schemas.keys import make_key

    from tests.factories import runs
    from tests.factories.dumps import make_prompt

    ids = ["req.0", "req.1", "chatcmpl-1.5/abc", "a b", "x" * 300, "Ünïcode \U0001f600", "L02", "id", "raw", "index"]
    prompts = [make_prompt(make_key(id_), 3 + i, sample_id=id_) for i, id_ in enumerate(ids)]
    run = runs.make_run_of(tmp_path / "run", prompts)
    pack(run, tmp_path / "d", workers=2)
    check_bits(run, tmp_path / "d", [prompt.key for prompt in prompts])
    assert [row.id for row in read_index(DatasetFolder(tmp_path / "d").index)] == ids
    for contents in members(tmp_path / "d").values():
        assert json.loads(contents["meta.json"])["id"] in ids


def test_views_of_large_tensors_are_packed_by_their_rows_with_a_warning(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(16,))
    [path] = run.dumps_of("p0")
    content = torch.load(path, weights_only=True)
    for name, state in run.states("p0").items():
        big = torch.randn(8192, 16).to(torch.bfloat16)
        big[100:116] = state
        content[name] = big[100:116]
    torch.save(content, path)
    relist(run, "p0")
    summary = pack(run, tmp_path / "d")
    assert summary.totals.size_bytes == 10_240
    assert any("saved views of larger tensors" in warning for warning in summary.warnings)
    check_bits(run, tmp_path / "d", ["p0"])
