"""A pack that was stopped at any moment ends as an undisturbed one; a finished one is left alone."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from eaglehs.builder.verify import verify_dataset
from eaglehs.schemas.states import Codec

from tests.factories.packed import SIZE, files, pack
from tests.factories.runs import SyntheticRun, make_run


def times(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    return make_run(tmp_path / "run", lengths=[12] * 12)


def test_a_dataset_that_is_there_already_is_not_touched(tmp_path: Path, run):
    first = pack(run, tmp_path / "d")
    before = times(tmp_path / "d")
    again = pack(run, tmp_path / "d", workers=3)
    assert again.is_unchanged
    assert not first.is_unchanged
    assert again.totals == first.totals
    assert {k: v for k, v in times(tmp_path / "d").items() if not k.endswith(".lock")} == {
        k: v for k, v in before.items() if not k.endswith(".lock")
    }


@pytest.mark.parametrize("lost", ["manifest.json", "_index/samples.parquet", "_index/.pack/claim.json"])
def test_a_lost_record_is_made_again_without_a_shard(tmp_path: Path, run, lost):
    pack(run, tmp_path / "d")
    before = files(tmp_path / "d")
    (tmp_path / "d" / lost).unlink()
    summary = pack(run, tmp_path / "d")
    assert summary.num_reused == summary.num_shards
    assert files(tmp_path / "d") == before


@pytest.mark.parametrize("damage", ["gone", "short", "record gone", "record cut"])
def test_a_shard_that_is_not_whole_is_made_again_alone(tmp_path: Path, run, damage):
    pack(run, tmp_path / "d")
    before = files(tmp_path / "d")
    shard, record = tmp_path / "d/data/train-00002.tar", tmp_path / "d/_index/.pack/train-00002.parquet"
    if damage == "gone":
        shard.unlink()
    elif damage == "short":
        os.truncate(shard, 512)
    elif damage == "record gone":
        record.unlink()
    else:
        os.truncate(record, 100)
    summary = pack(run, tmp_path / "d")
    assert summary.num_reused == summary.num_shards - 1
    assert files(tmp_path / "d") == before


def test_other_settings_replace_the_dataset_and_remove_its_leftover_shards(tmp_path: Path, run):
    pack(run, tmp_path / "d")
    pack(run, tmp_path / "d", shard_size_bytes=10**6)
    assert [path.name for path in (tmp_path / "d/data").iterdir()] == ["train-00000.tar"]
    pack(run, tmp_path / "fresh", shard_size_bytes=10**6)
    assert files(tmp_path / "d") == files(tmp_path / "fresh")
    pack(run, tmp_path / "d", shuffle_seed=1)
    pack(run, tmp_path / "shuffled", shuffle_seed=1)
    assert files(tmp_path / "d") == files(tmp_path / "shuffled")


def test_leftover_shards_are_known_from_the_manifest_alone(tmp_path: Path, run):
    """A dataset that was copied without its hidden records."""
    pack(run, tmp_path / "d")
    shutil.rmtree(tmp_path / "d/_index/.pack")
    pack(run, tmp_path / "d", shard_size_bytes=10**6)
    assert [path.name for path in (tmp_path / "d/data").iterdir()] == ["train-00000.tar"]


def test_part_files_of_dead_packs_are_removed(tmp_path: Path, run):
    pack(run, tmp_path / "d")
    for name in ("data/.train-00001.tar.77.part", "_index/.samples.parquet.77.part", ".manifest.json.77.part"):
        (tmp_path / "d" / name).write_bytes(b"half")
    (tmp_path / "d/manifest.json").unlink()
    pack(run, tmp_path / "d")
    assert not list((tmp_path / "d").rglob("*.part"))


def test_a_killed_pack_goes_on_at_its_unfinished_shard(tmp_path: Path):
    """A real process, killed in the middle of its third shard; at no moment is a file under a shard's name cut."""
    run = make_run(tmp_path / "run", lengths=[300] * 12, hidden_size=512)
    settings = {"shard_size_bytes": 4_000_000}
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from eaglehs.builder import shard_stream
        from eaglehs.builder.pack import PackSettings, pack_run
        from eaglehs.schemas.progress import Silent
        real, count = shard_stream.ShardStream._append, 0
        def append(*arguments):
            global count
            count += 1
            real(*arguments)
            if count == 29:
                os.kill(os.getpid(), signal.SIGKILL)
        shard_stream.ShardStream._append = append
        pack_run(Path({str(run.root)!r}), Path({str(tmp_path / "d")!r}), PackSettings(**{settings}), Silent())
    """)
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "d/data").iterdir())
    assert [name for name in left if not name.startswith(".")] == ["train-00000.tar", "train-00001.tar"]
    assert len(left) == 3
    assert not (tmp_path / "d/manifest.json").exists()
    whole = {name: at for name, at in times(tmp_path / "d/data").items() if name.endswith(".tar")}
    summary = pack(run, tmp_path / "d", **settings)
    assert summary.num_reused == 2
    assert {name: times(tmp_path / "d/data")[name] for name in whole} == whole
    pack(run, tmp_path / "fresh", **settings)
    assert files(tmp_path / "d") == files(tmp_path / "fresh")
    assert verify_dataset(tmp_path / "d").is_good


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_a_pack_killed_at_any_moment_ends_as_an_undisturbed_one(tmp_path: Path, delay_s, codec: Codec):
    run = make_run(tmp_path / "run", lengths=[30] * 60, chunk_rows=16)
    script = textwrap.dedent(f"""
        from pathlib import Path
        from eaglehs.builder.pack import PackSettings, pack_run
        from eaglehs.schemas.progress import Silent
        from eaglehs.schemas.states import Codec
        settings = PackSettings(shard_size_bytes={SIZE}, workers=2, codec=Codec({str(codec)!r}))
        print("go", flush=True)
        pack_run(Path({str(run.root)!r}), Path({str(tmp_path / "d")!r}), settings, Silent())
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(delay_s)
    process.kill()
    process.communicate()
    pack(run, tmp_path / "d", codec=codec)
    pack(run, tmp_path / "fresh", workers=2, codec=codec)
    assert files(tmp_path / "d") == files(tmp_path / "fresh")


def test_ctrl_c_leaves_no_part_file_and_the_next_pack_goes_on(tmp_path: Path, run, monkeypatch):
    from eaglehs.builder import shard_packer

    real, count = shard_packer.examine_finished, []

    def interrupted(*arguments: object):
        count.append(1)
        if len(count) == 7:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(shard_packer, "examine_finished", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(run, tmp_path / "d", workers=2)
    monkeypatch.undo()
    assert not list((tmp_path / "d").rglob("*.part"))
    pack(run, tmp_path / "d")
    pack(run, tmp_path / "fresh")
    assert files(tmp_path / "d") == files(tmp_path / "fresh")
