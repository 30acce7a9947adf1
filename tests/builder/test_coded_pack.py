"""`pack --codec planes-zstd`: whatever the samples, sizes, workers and kills, the bits of the plain dataset."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from datasets import load_dataset
from eaglehs.builder import pack_folder
from eaglehs.builder.decode import decode
from eaglehs.builder.index_store import read_index, read_index_head
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.pack_folder import NoSpaceError
from eaglehs.builder.read_back import ShardReadBackError
from eaglehs.builder.stream import stream
from eaglehs.builder.verify import verify_dataset
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.errors import RecordError
from eaglehs.schemas.manifest import DatasetFolder, Manifest
from eaglehs.schemas.progress import Silent
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builder.test_planes import KINDS, states_of
from tests.factories.coded import PLANES, small_blocks
from tests.factories.datasets import SyntheticDataset
from tests.factories.packed import files
from tests.factories.readable import assert_all_samples, assert_same_sample
from tests.factories.runs import SyntheticRun, finish_sample, make_run

SIZE = 20_480


def pack(run: SyntheticRun, out: Path, **options: object):
    given = {"shard_size_bytes": SIZE, "codec": PLANES, **options}
    return pack_run(run.root, out, PackSettings(**given), Silent())


def dataset_of(run: SyntheticRun, root: Path) -> SyntheticDataset:
    return SyntheticDataset(folder=DatasetFolder(root), run=run)


def any_run(root: Path, samples: list[tuple[str, int]], hidden_size: int) -> SyntheticRun:
    """Make a run whose samples have states of the kinds and lengths that `samples` says, finite and with a level."""
    keys = [f"p{number}" for number in range(len(samples))]
    lengths = {key: length for key, (_, length) in zip(keys, samples, strict=True)}
    run = make_run(root, lengths=lengths, hidden_size=hidden_size, unfinished=keys)

    def states(key: str) -> dict[str, torch.Tensor]:
        kind, length = samples[keys.index(key)]
        found = {}
        for number, name in enumerate(("layer_2", "layer_5", "layer_9", "final")):
            bits_TH = states_of(kind, length, hidden_size, seed=31 * keys.index(key) + number)
            bits_TH = np.where((bits_TH & 0x7F80) == 0x7F80, bits_TH & 0xBFFF, bits_TH)  # finite
            bits_TH[:, 0] = 0x4000 + number  # no state is zero, level or that of another layer,
            bits_TH[:, 1] = 0x3F80 + np.arange(length)  # no row is the one before
            found[name] = torch.from_numpy(bits_TH.astype("<u2")).view(torch.bfloat16)
        return found

    run.states = states  # type: ignore[method-assign]
    for prompt in run.prompts:
        finish_sample(run, prompt, chunk_rows=16)
    return run


@given(
    samples=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 60)), min_size=1, max_size=6),
    hidden_size=st.sampled_from([2, 16, 40]),
    shard_size=st.integers(1, 100_000),
    workers=st.integers(1, 3),
    seed=st.none() | st.integers(0, 3),
    block_bytes=st.sampled_from([1, 256, 10**6]),
)
@settings(max_examples=20)
def test_any_run_packs_to_what_every_reader_gives_as_of_the_plain_dataset(
    tmp_path_factory, samples, hidden_size, shard_size, workers, seed, block_bytes
):
    root = tmp_path_factory.mktemp("coded")
    run = any_run(root / "run", samples, hidden_size)
    options = {"shard_size_bytes": shard_size, "workers": workers, "shuffle_seed": seed}
    plain = pack_run(run.root, root / "plain", PackSettings(**options), Silent())
    with small_blocks(block_bytes):
        coded = pack(run, root / "coded", **options)
    assert plain.set_aside == coded.set_aside == ()
    assert verify_dataset(root / "coded").faults == ()
    for ours, others in zip(
        dataset_of(run, root / "coded").shards, dataset_of(run, root / "plain").shards, strict=True
    ):
        assert ours.name == others.name
        assert ours.stat().st_size <= others.stat().st_size
    dataset = dataset_of(run, root / "coded")
    order = [row.key for row in read_index(DatasetFolder(root / "plain").index)]
    write_card(dataset.root)
    readers = {
        "stream": list(stream(dataset.root)),
        "stock": [decode(row) for row in load_dataset(str(dataset.root), split="train", streaming=True)],
        "webdataset": [decode(row) for row in open_web(dataset)],
        "webdataset, decoded": [decode(row) for row in open_web(dataset).decode()],
    }
    for samples_read in readers.values():
        assert [sample["key"] for sample in samples_read] == order
        assert_all_samples(samples_read, dataset)
    for sample in stream(dataset.root, max_tokens=7, states=["final"]):
        assert list(sample) == ["key", "input_ids", "loss_mask", "final"]
        expected = dataset.bits(sample["key"])["final"][:7]
        np.testing.assert_array_equal(sample["final"].view(torch.uint16).numpy(), expected)


def open_web(dataset: SyntheticDataset) -> webdataset.WebDataset:
    return webdataset.WebDataset([str(shard) for shard in dataset.shards], shardshuffle=False, empty_check=False)


def test_manifest_and_index_say_that_they_are_coded_and_plain_ones_are_as_they_were(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(5, 12, 33))
    pack(run, tmp_path / "coded")
    pack(run, tmp_path / "plain", codec=PackSettings().codec)
    coded, plain = DatasetFolder(tmp_path / "coded"), DatasetFolder(tmp_path / "plain")
    assert '"codec": "planes-zstd"' in coded.manifest.read_text()
    assert '"version": 2' in coded.manifest.read_text()
    assert '"version": 1' in plain.manifest.read_text()
    assert "codec" not in plain.manifest.read_text()
    assert (read_index_head(coded.index).is_coded, read_index_head(plain.index).is_coded) == (True, False)
    for ours, other in zip(read_index(coded.index), read_index(plain.index), strict=True):
        for name, place in ours.arrays.items():
            other_place = other.arrays[name]
            assert (place.length, place.xxh3_128) == (other_place.length, other_place.xxh3_128)
            assert (place.coded is None) == (name in ("input_ids", "loss_mask"))
    with pytest.raises(RecordError, match="unknown key 'codec'"):
        plain.manifest.write_text(coded.manifest.read_text().replace('"version": 2', '"version": 1'))
        read_record(Manifest, plain.manifest)


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=range(1, 30), chunk_rows=16)
    pack(run, tmp_path / "one")
    summary = pack(run, tmp_path / "two", workers=2)
    assert summary.num_shards > 5
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert not list(tmp_path.rglob("*.part"))


def test_another_codec_replaces_the_dataset_and_the_same_one_leaves_it(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 12)
    pack(run, tmp_path / "d", codec=PackSettings().codec)
    plain = files(tmp_path / "d")
    assert pack(run, tmp_path / "d").num_reused == 0
    assert pack(run, tmp_path / "d").is_unchanged
    assert verify_dataset(tmp_path / "d").is_good
    pack(run, tmp_path / "d", codec=PackSettings().codec)
    assert files(tmp_path / "d") == plain


def test_a_sample_that_is_finished_later_changes_its_shard_only(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 9, failed={"p4": "p4: x"})
    first = pack(run, tmp_path / "d")
    finish_sample(run, run.prompt("p4"))
    run.failed = ()
    again = pack(run, tmp_path / "d")
    assert again.num_reused == first.num_shards - 1
    dataset = dataset_of(run, tmp_path / "d")
    for sample in stream(dataset.root):
        assert_same_sample(sample, dataset, sample["key"])


def test_a_bad_dump_is_set_aside_and_the_shard_is_coded_without_it(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=[12] * 9)
    run.dumps_of("p4")[0].write_bytes(b"PK")
    summary = pack(run, tmp_path / "d")
    assert [item.key for item in summary.set_aside] == ["p4"]
    assert verify_dataset(tmp_path / "d").is_good
    assert [sample["key"] for sample in stream(tmp_path / "d")] == [f"p{i}" for i in range(9) if i != 4]


def test_a_pack_killed_while_it_recodes_goes_on_at_that_shard(tmp_path: Path):
    """A real process, killed while it writes its third coded shard; no file under a shard's name is ever cut."""
    run = make_run(tmp_path / "run", lengths=[100] * 12, hidden_size=512)
    options = {"shard_size_bytes": 1_300_000}
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from eaglehs.builder import shard_coder
        from eaglehs.builder.pack import PackSettings, pack_run
        from eaglehs.schemas.progress import Silent
        from eaglehs.schemas.states import Codec
        real, count = shard_coder.write_state, 0
        def write(*arguments):
            global count
            count += 1
            if count == 4 * 3 * 2 + 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        shard_coder.write_state = write
        settings = PackSettings(codec=Codec.PLANES_ZSTD, **{options})
        pack_run(Path({str(run.root)!r}), Path({str(tmp_path / "d")!r}), settings, Silent())
    """)
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "d/data").iterdir())
    assert [name for name in left if not name.startswith(".")] == ["train-00000.tar", "train-00001.tar"]
    assert len(left) == 4  # the plain shard and what was coded of it
    assert not (tmp_path / "d/manifest.json").exists()
    summary = pack(run, tmp_path / "d", **options)
    assert summary.num_reused == 2
    assert not list(tmp_path.rglob("*.part"))
    pack(run, tmp_path / "fresh", **options)
    assert files(tmp_path / "d") == files(tmp_path / "fresh")
    assert verify_dataset(tmp_path / "d").is_good


def test_ctrl_c_while_a_shard_is_recoded_leaves_no_part_file(tmp_path: Path, monkeypatch):
    from eaglehs.builder import shard_coder

    run = make_run(tmp_path / "run", lengths=[12] * 12)
    real, count = shard_coder.write_state, []

    def interrupted(*arguments: object):
        count.append(1)
        if len(count) == 17:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(shard_coder, "write_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(run, tmp_path / "d", workers=2)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.part"))
    pack(run, tmp_path / "d")
    pack(run, tmp_path / "fresh")
    assert files(tmp_path / "d") == files(tmp_path / "fresh")


def test_a_dump_that_changes_after_its_check_never_reaches_a_coded_shard(tmp_path: Path, monkeypatch):
    from eaglehs.builder import shard_packer

    run = make_run(tmp_path / "run", lengths=(12,))
    real = shard_packer.write_sample

    def spoiled(writer, placed, meta, prompt, dumps):
        real(writer, placed, meta, prompt, dumps)
        last = placed.members[-1]
        os.pwrite(writer._out, b"\x01", last.data_offset + last.data_bytes - 1)

    monkeypatch.setattr(shard_packer, "write_sample", spoiled)
    with pytest.raises(ShardReadBackError, match="final of p0 reads back other bytes"):
        pack(run, tmp_path / "d")
    assert not list((tmp_path / "d").rglob("*.tar"))
    assert not list((tmp_path / "d").rglob("*.part"))


def test_a_coder_that_loses_a_bit_is_found_before_the_shard_has_its_name(tmp_path: Path, monkeypatch):
    from eaglehs.builder import shard_coder

    run = make_run(tmp_path / "run", lengths=(12,))
    real = shard_coder.encode_rows

    def lossy(rows_NH):
        other = rows_NH.copy()
        other[-1, -1] ^= 1
        return real(other)

    monkeypatch.setattr(shard_coder, "encode_rows", lossy)
    with pytest.raises(ShardReadBackError, match="layer_2 of p0 reads back other bytes"):
        pack(run, tmp_path / "d")
    assert not list((tmp_path / "d").rglob("*.tar"))


def test_room_for_a_plain_shard_of_each_worker_is_asked_for_beforehand(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run", lengths=[12] * 12)
    sizes = [entry.size_bytes for entry in plain_entries(run, tmp_path / "plain")]
    usage = pack_folder.shutil.disk_usage(tmp_path)
    for workers in (1, 2):
        needed = sum(sizes) + sum(sorted(sizes)[-workers:])
        monkeypatch.setattr(pack_folder.shutil, "disk_usage", lambda _, n=needed: usage._replace(free=n - 1))
        with pytest.raises(NoSpaceError, match=f"need {needed:,} bytes"):
            pack(run, tmp_path / "d", workers=workers)
        monkeypatch.setattr(pack_folder.shutil, "disk_usage", lambda _, n=needed: usage._replace(free=n))
        pack(run, tmp_path / f"d{workers}", workers=workers)


def plain_entries(run: SyntheticRun, root: Path):
    pack(run, root, codec=PackSettings().codec)
    return read_record(Manifest, DatasetFolder(root).manifest).shards


def test_the_sha256_of_the_manifest_is_that_of_the_coded_file(tmp_path: Path):
    run = make_run(tmp_path / "run", lengths=(5, 12, 33))
    pack(run, tmp_path / "d")
    manifest = read_record(Manifest, DatasetFolder(tmp_path / "d").manifest)
    for entry in manifest.shards:
        content = (tmp_path / "d" / entry.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.size_bytes, entry.sha256)
    assert manifest.totals == replace(manifest.totals, size_bytes=sum(entry.size_bytes for entry in manifest.shards))
