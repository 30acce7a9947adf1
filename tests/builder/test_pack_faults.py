"""Bad dumps are set aside with id and reason, the rest is packed; what is not the pack's own is never touched."""

import errno
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from eaglehs.builder import shard_packer
from eaglehs.builder.pack import NothingToPackError
from eaglehs.builder.pack_folder import ForeignFolderError, NoSpaceError
from eaglehs.builder.pack_state import locked
from eaglehs.builder.prompt_table import PromptTable
from eaglehs.builder.run_reader import Run
from eaglehs.builder.verify import verify_dataset
from eaglehs.schemas.errors import RecordError, StorageError, UsageError
from eaglehs.schemas.prompt import Prompt
from eaglehs.schemas.states import Codec

from tests.factories.dumps import make_prompt
from tests.factories.packed import check_bits, files, members, pack
from tests.factories.runs import change_record, make_run, relist, write_prompts_file


def resave(path: Path, **changes: object) -> None:
    content = torch.load(path, weights_only=True) | changes
    torch.save({key: value for key, value in content.items() if value is not None}, path)


def poke(path: Path, state: str, row: int, value: float) -> None:
    content = torch.load(path, weights_only=True)
    content[state][row, 2] = value
    torch.save(content, path)


def test_cut_dumps_among_good_ones_are_all_named_and_the_rest_is_packed(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[6] * 20)
    for key, share in (("p3", 0.0), ("p7", 0.01), ("p11", 0.5), ("p19", 0.9999)):
        [path] = run.dumps_of(key)
        os.truncate(path, int(path.stat().st_size * share))
    summary = pack(run, tmp_path / "d", workers=2)
    bad = ["p3", "p7", "p11", "p19"]
    assert sorted(item.key for item in summary.set_aside) == sorted(bad)
    assert all(str(run.dumps_of(item.key)[0]) in item.reason for item in summary.set_aside)
    check_bits(run, tmp_path / "d", [f"p{i}" for i in range(20) if f"p{i}" not in bad])
    assert verify_dataset(tmp_path / "d").is_good
    assert sum(summary.failed.values()) == 4


def test_what_extraction_overlooked_is_refused_by_pack(tmp_path: Path):
    """Each file is as the ledger lists it, so only the checks of its content can tell."""
    run = make_run(tmp_path / "run", lengths=[40] * 10)
    changes = {
        "p3": lambda path: poke(path, "layer_5", 3, float("nan")),
        "p6": lambda path: poke(path, "final", 39, float("inf")),
        "p7": lambda path: resave(path, layer_5=torch.zeros(40, 16, dtype=torch.bfloat16)),
        "p8": lambda path: resave(path, input_ids=torch.zeros(40, dtype=torch.int32)),
        "p9": lambda path: resave(path, layer_9=None),
    }
    for key, change in changes.items():
        change(run.dumps_of(key)[0])
        relist(run, key)
    summary = pack(run, tmp_path / "d")
    reasons = {item.key: item.reason for item in summary.set_aside}
    assert sorted(reasons) == sorted(changes)
    assert "row 3 of layer_5 holds NaN" in reasons["p3"]
    assert "row 39 of final holds an infinite value" in reasons["p6"]
    assert "layer_5 are zero" in reasons["p7"]
    assert "token 0 is 0" in reasons["p8"]
    assert "'layer_9' is missing" in reasons["p9"]
    check_bits(run, tmp_path / "d", ["p0", "p1", "p2", "p4", "p5"])


@pytest.mark.parametrize("key", ["p2", "p6", "p7"])
def test_a_sample_with_another_set_of_states_is_refused_wherever_it_stands(tmp_path: Path, key):
    run = make_run(tmp_path / "run", lengths=[9] * 8)
    extra = {"layer_11": torch.ones(9, 16, dtype=torch.bfloat16), "layers": [2, 5, 9, 11]}
    resave(run.dumps_of(key)[0], **(extra if key == "p7" else {"final": None}))
    relist(run, key)
    summary = pack(run, tmp_path / "d")
    assert [item.key for item in summary.set_aside] == [key]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 32}, r"shape \[12, 32\]"),
        ({"layers": (2, 5, 8)}, "'layer_9' is missing"),
    ],
)
def test_dumps_of_another_model_are_never_mixed_in(tmp_path: Path, options, message):
    run = make_run(tmp_path / "run", lengths=[12] * 3)
    other = make_run(tmp_path / "other", lengths=[12] * 3, **options)
    shutil.copy(other.dumps_of("p1")[0], run.dumps_of("p1")[0])
    relist(run, "p1")
    [item] = pack(run, tmp_path / "d").set_aside
    assert item.key == "p1"
    assert re.search(message, item.reason)


def test_a_dump_of_another_run_is_refused(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 2)
    change_record(run, run_id="ffffffff")
    with pytest.raises(NothingToPackError, match="2 x … is of run N"):
        pack(run, tmp_path / "d")


def test_a_dump_that_changed_after_its_ledger_line_is_refused(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 3)
    [path] = run.dumps_of("p1")
    poke(path, "final", 0, 1.5)
    [item] = pack(run, tmp_path / "d").set_aside
    assert item.key == "p1"
    assert "the ledger lists" in item.reason


def test_a_missing_dump_sets_its_sample_aside(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[40] * 3, chunk_rows=16)
    run.dumps_of("p1")[1].unlink()
    [item] = pack(run, tmp_path / "d").set_aside
    assert (item.key, item.id) == ("p1", "p1")
    assert "is not there" in item.reason


@pytest.mark.parametrize("loss", [Path.unlink, lambda path: os.truncate(path, 2000)])
def test_a_dump_that_is_lost_between_its_check_and_its_copy_is_set_aside(tmp_path: Path, monkeypatch, loss):
    run = make_run(tmp_path / "run", lengths=[12] * 3)
    real = shard_packer.examine_finished

    def lose(run_: Run, prompt: Prompt) -> object:
        examined = real(run_, prompt)
        if prompt.key == "p1":
            loss(run.dumps_of("p1")[0])
        return examined

    monkeypatch.setattr(shard_packer, "examine_finished", lose)
    [item] = pack(run, tmp_path / "d").set_aside
    assert item.key == "p1"
    check_bits(run, tmp_path / "d", ["p0", "p2"])


def test_a_sample_that_was_set_aside_is_tried_again(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 8)
    [path] = run.dumps_of("p5")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [item.key for item in pack(run, tmp_path / "d").set_aside] == ["p5"]
    path.write_bytes(whole)
    assert pack(run, tmp_path / "d").set_aside == ()
    pack(run, tmp_path / "fresh")
    assert files(tmp_path / "d") == files(tmp_path / "fresh")


def test_two_prompts_with_one_key_are_refused_however_far_apart(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[5] * 20)
    write_prompts_file(run.folder.prompts, [*run.prompts, make_prompt("p0", 5)])
    with pytest.raises(RecordError, match="key p0 is already that of row 0"):
        pack(run, tmp_path / "d")


def test_random_damage_to_a_run_is_named_or_harmless_and_never_packed_wrong(tmp_path: Path):
    """Flips bytes of dumps; whatever is packed afterwards has the right bits."""
    dice = random.Random(3)
    run = make_run(tmp_path / "run", lengths=[7] * 30)
    for prompt in run.prompts:
        [path] = run.dumps_of(prompt.key)
        raw = bytearray(path.read_bytes())
        if dice.random() < 0.5:
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
        path.write_bytes(raw)
    summary = pack(run, tmp_path / "d")
    bad = {item.key for item in summary.set_aside}
    assert 5 < len(bad) < 25
    check_bits(run, tmp_path / "d", [prompt.key for prompt in run.prompts if prompt.key not in bad])


def test_two_packs_into_one_locks_each_other_out(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with locked(tmp_path / "d"), pytest.raises(UsageError, match="another eaglehs is packing"):
        pack(run, tmp_path / "d")


def test_a_folder_with_another_runs_dataset_is_refused_and_untouched(tmp_path: Path):
    run = make_run(tmp_path / "run")
    pack(run, tmp_path / "d")
    before = files(tmp_path / "d")
    other = make_run(tmp_path / "other")
    change_record(other, run_id="ffffffff")
    with pytest.raises(ForeignFolderError, match="dataset of run 0123abcd, this is run ffffffff"):
        pack(other, tmp_path / "d")
    shutil.rmtree(tmp_path / "d/_index/.pack")
    with pytest.raises(ForeignFolderError, match="dataset of run 0123abcd"):
        pack(other, tmp_path / "d")
    assert files(tmp_path / "d") == before


@pytest.mark.parametrize("name", ["train-00000.tar", "train-00099.tar", "notes.json"])
def test_files_that_no_pack_wrote_are_refused_and_untouched(tmp_path: Path, name):
    (tmp_path / "d/data").mkdir(parents=True)
    (tmp_path / "d/data" / name).write_bytes(b"mine")
    with pytest.raises(ForeignFolderError, match=name):
        pack(make_run(tmp_path / "run"), tmp_path / "d")
    assert (tmp_path / "d/data" / name).read_bytes() == b"mine"


def test_a_readme_that_no_pack_wrote_is_refused_and_untouched(tmp_path: Path):
    """A project's own folder given to --out: the card took the place of its README.md without a word."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/README.md").write_text("my project")
    with pytest.raises(ForeignFolderError, match=r"d/README\.md is no card of a dataset"):
        pack(make_run(tmp_path / "run"), tmp_path / "d")
    assert (tmp_path / "d/README.md").read_text() == "my project"


@pytest.mark.parametrize("out", ["run", "."])
def test_a_dataset_around_its_run_is_refused_and_nothing_written(tmp_path: Path, out):
    run = make_run(tmp_path / "run")
    before = files(tmp_path)
    with pytest.raises(UsageError, match="would lie in the dataset's folder"):
        pack(run, tmp_path / out)
    assert files(tmp_path) == before


def test_a_manifest_that_cant_be_read_is_refused(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/manifest.json").write_text("{}")
    with pytest.raises(ForeignFolderError, match="may hold another dataset"):
        pack(make_run(tmp_path / "run"), tmp_path / "d")


def test_too_little_space_is_refused_before_the_first_shard_with_both_numbers(tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=30_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    run = make_run(tmp_path / "run", lengths=[40] * 10)
    with pytest.raises(NoSpaceError, match=r"need 204,800 bytes .* 30,000 bytes"):
        pack(run, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_disk_that_fills_up_keeps_finished_shards_and_leaves_no_part(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run", lengths=[12] * 9)
    real, calls = os.pwrite, []

    def full(*arguments: object) -> int:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"No space left.*finished shards are kept"):
        pack(run, tmp_path / "d")
    monkeypatch.undo()
    assert not (tmp_path / "d/manifest.json").exists()
    kept = sorted((tmp_path / "d/data").iterdir())
    assert kept
    assert all(path.name.startswith("train-") for path in kept)
    assert pack(run, tmp_path / "d").num_reused == len(kept)
    pack(run, tmp_path / "fresh")
    assert files(tmp_path / "d") == files(tmp_path / "fresh")


def test_a_dump_that_changes_between_its_check_and_its_copy_is_set_aside(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run", lengths=[12] * 3)
    real = shard_packer.write_sample

    def change_one(writer, placed, meta, prompt, dumps) -> None:
        if placed.key == "p1":
            with dumps[0].path.open("r+b") as dump:
                dump.seek(dumps[0].arrays["layer_2"].offset)
                dump.write(b"\xff\x00")
        real(writer, placed, meta, prompt, dumps)

    monkeypatch.setattr(shard_packer, "write_sample", change_one)
    [item] = pack(run, tmp_path / "d").set_aside
    assert item.key == "p1"
    assert "layer_2 of p1 has other bytes than when it was checked" in item.reason
    check_bits(run, tmp_path / "d", ["p0", "p2"])


@pytest.mark.parametrize("codec", Codec)
def test_a_disk_that_fails_under_a_dump_is_not_blamed_on_the_shard(tmp_path: Path, monkeypatch, codec: Codec):
    run = make_run(tmp_path / "run", lengths=[12] * 3)
    real = shard_packer.write_sample

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def fail_behind_the_check(writer, placed, meta, prompt, dumps) -> None:
        with monkeypatch.context() as patch:
            if placed.key == "p1":
                for way in ("preadv", "pread", "copy_file_range", "sendfile"):  # all that read a dump
                    patch.setattr(os, way, fail)
            real(writer, placed, meta, prompt, dumps)

    monkeypatch.setattr(shard_packer, "write_sample", fail_behind_the_check)
    [item] = pack(run, tmp_path / "d", codec=codec).set_aside
    assert item.key == "p1"
    assert f"{run.dumps_of('p1')[0]}: can't be read: Input/output error" in item.reason
    assert list(members(tmp_path / "d")) == ["p0", "p2"]
    assert verify_dataset(tmp_path / "d").is_good


def test_many_small_dumps_start_quickly_and_stay_small_in_memory(tmp_path: Path):
    prompts = [make_prompt(f"k{i}", 1) for i in range(20_000)]
    write_prompts_file(tmp_path / "p", prompts)
    started = time.process_time()
    with PromptTable(tmp_path / "p", vocab_size=1000) as table:
        assert len(table.planned()) == 20_000
    assert time.process_time() - started < 6  # of processor time: 200,000 in a minute
