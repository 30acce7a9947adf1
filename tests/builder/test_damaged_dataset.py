"""Each kind of damage to a dataset, met by both who check and who read: `verify` and `eaglehs.stream` name it alike."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from eaglehs.builder.catalog import DatasetMismatchError, MissingShardError
from eaglehs.builder.decode import DecodedSample
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.pack_state import locked
from eaglehs.builder.stream import HiddenStateStream, stream
from eaglehs.builder.verify import verify_dataset
from eaglehs.schemas.errors import DataError, EaglehsError, StorageError, UsageError
from eaglehs.schemas.progress import Silent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.packing import pack_by_hand
from tests.factories.readable import LENGTHS, assert_all_samples
from tests.factories.runs import make_run

MODES = ("map", "arena")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    """A dataset that no test changes."""
    dataset = make_dataset(tmp_path_factory.mktemp("whole"), lengths=LENGTHS)
    assert faults(dataset) == ""
    return dataset


def copy_of(dataset: SyntheticDataset, root: Path) -> SyntheticDataset:
    shutil.copytree(dataset.root, root)
    return SyntheticDataset(folder=type(dataset.folder)(root), run=dataset.run)


def faults(dataset: SyntheticDataset) -> str:
    return "\n".join(str(fault) for fault in verify_dataset(dataset.root).faults)


def member_borders(shard: Path) -> list[int]:
    """Return where a member's header begins, and where the data of the last one end."""
    with tarfile.open(shard) as archive:
        members = archive.getmembers()
    return [member.offset for member in members] + [members[-1].offset_data + -(-members[-1].size // 512) * 512]


# ------------------------------------------------------------------ a shard that is cut


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_cut_at_any_member_border_is_named_by_both(whole: SyntheticDataset, tmp_path: Path, mode: str):
    dataset = copy_of(whole, tmp_path / "d")
    shard = dataset.shards[1]
    content, opened = shard.read_bytes(), stream(dataset.root, staging=mode)
    stat = shard.stat()
    for border in member_borders(shard):
        os.truncate(shard, border)
        assert f"{shard.name}: has {border:,} bytes, manifest.json says {len(content):,}" in faults(dataset)
        with pytest.raises(DatasetMismatchError, match=rf"{shard.name} has {border:,} bytes, the manifest says"):
            stream(dataset.root, staging=mode)
        if border < dataset_end(opened, shard):
            with pytest.raises(DataError, match=shard.name):
                list(opened)
        shard.write_bytes(content)
        os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert faults(dataset) == ""
    assert_all_samples(list(opened), dataset)


def dataset_end(samples: HiddenStateStream, shard: Path) -> int:
    """Return where the last array that the index has in a shard ends."""
    rows = [row for row in samples._catalog.rows if row.shard.endswith(shard.name)]
    return max(place.offset + place.length for row in rows for place in row.arrays.values())


# ------------------------------------------------------------------ a flipped byte


@settings(max_examples=60)
@given(
    shard_number=st.integers(0, 3),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    mode=st.sampled_from(MODES),
)
def test_a_flipped_bit_of_any_byte_is_named_by_verify_and_never_streamed(whole, shard_number, where, bit, mode):
    with tempfile.TemporaryDirectory() as root:
        dataset = copy_of(whole, Path(root) / "d")
        shard = dataset.shards[shard_number]
        content = bytearray(shard.read_bytes())
        place = int(where * len(content))
        content[place] ^= 1 << bit
        shard.write_bytes(content)
        assert shard.name in faults(dataset)
        key, array = array_at(dataset, shard, place)
        samples, fault = samples_or_fault(stream(dataset.root, staging=mode, verify=True))
        if fault is None:  # a byte that no sample is made of
            assert not array
            assert_all_samples(samples, dataset)
        else:
            assert shard.name in str(fault)
            assert not array or f"{array} of sample {key} " in str(fault)


def samples_or_fault(samples: HiddenStateStream) -> tuple[list[DecodedSample], DataError | None]:
    try:
        return list(samples), None
    except DataError as fault:
        return [], fault


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_byte_of_each_member_is_named_by_both(whole: SyntheticDataset, tmp_path: Path, mode: str):
    dataset = copy_of(whole, tmp_path / "d")
    shard = dataset.shards[1]
    with tarfile.open(shard) as archive:
        members = archive.getmembers()
    for member in members:
        place = member.offset_data + member.size // 2
        flip(shard, place)
        key, array = array_at(dataset, shard, place)
        assert shard.name in faults(dataset)
        if array:
            assert f"{key} {array}" in faults(dataset)
            with pytest.raises(DataError, match=rf"{shard.name}: {array} of sample {key} "):
                list(stream(dataset.root, staging=mode, verify=True))
        flip(shard, place)
    assert sum(".meta.json" not in member.name for member in members) >= 6


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))


def array_at(dataset: SyntheticDataset, shard: Path, place: int) -> tuple[str, str]:
    """Return the key and the array whose data are at byte `place` of a shard; empty if none are."""
    for row in stream(dataset.root)._catalog.rows:
        for name, array in row.arrays.items():
            if row.shard.endswith(shard.name) and array.offset <= place < array.offset + array.length:
                return row.key, name
    return "", ""


# ------------------------------------------------------------------ files that are not the dataset's


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_shard_is_named_by_both_before_and_after_opening(whole: SyntheticDataset, tmp_path: Path, mode: str):
    dataset = copy_of(whole, tmp_path / "d")
    opened = stream(dataset.root, staging=mode)
    dataset.shards[2].unlink()
    assert "train-00002.tar: can't be read: No such file" in faults(dataset)
    with pytest.raises(MissingShardError, match=r"train-00002\.tar is missing"):
        stream(dataset.root, staging=mode)
    with pytest.raises(StorageError, match=r"train-00002\.tar can't be opened: No such file"):
        list(opened)


def other_lengths(root: Path) -> SyntheticDataset:
    return make_dataset(root, lengths=LENGTHS[::-1])


def other_keys(root: Path) -> SyntheticDataset:
    return make_dataset(root, lengths={f"q{number}": length for number, length in enumerate(LENGTHS)})


def other_states(root: Path) -> SyntheticDataset:
    return make_dataset(root, layers=(2, 5, 8))


@pytest.mark.parametrize("make_other", [other_lengths, other_keys, other_states])
def test_the_index_of_another_dataset_is_refused_by_both(
    whole: SyntheticDataset, tmp_path: Path, make_other: Callable[[Path], SyntheticDataset]
):
    dataset, other = copy_of(whole, tmp_path / "d"), make_other(tmp_path / "other")
    shutil.copy(other.folder.index, dataset.folder.index)
    assert "index" in faults(dataset)
    with pytest.raises(DatasetMismatchError):
        list(stream(dataset.root))


@pytest.mark.parametrize("mode", MODES)
def test_the_index_of_another_extraction_of_the_same_prompts_is_refused_by_both(tmp_path: Path, mode: str):
    """Keys, lengths and places are the same: the checksums alone differ."""
    dataset, other = make_dataset(tmp_path / "d"), make_dataset(tmp_path / "other")
    plain = other.run.bits
    other.run.bits = lambda key: {name: bits ^ (name == "final") for name, bits in plain(key).items()}
    shutil.rmtree(other.root)
    pack_by_hand(other.run, other.root, 20_480)
    shutil.copy(other.folder.index, dataset.folder.index)
    assert "p0: index and shard differ" in faults(dataset)
    with pytest.raises(DatasetMismatchError, match="another extraction of sample p0"):
        list(stream(dataset.root, staging=mode))


def test_shards_in_another_order_are_named_by_verify(tmp_path: Path):
    """By the stream too: tests/builder/test_reader_modes.py, in every mode."""
    dataset = make_dataset(tmp_path, lengths=[40] * 4)
    first, second = dataset.shards[:2]
    for source, target in ((first, "swap"), (second, first.name), (first.with_name("swap"), second.name)):
        source.rename(source.with_name(target))
    found = faults(dataset)
    assert "p0: is in the index, not in the shard" in found
    assert "train-00000.tar" in found
    assert "train-00001.tar" in found


# ------------------------------------------------------------------ a pack into the folder that is being read


@pytest.mark.parametrize("mode", MODES)
def test_a_pack_into_the_folder_that_is_read_is_an_error_and_never_other_samples(tmp_path: Path, mode: str):
    """The new shards have the same names and first samples; some have the size of the old ones."""
    run = make_run(tmp_path / "run", lengths=[20] * 8)
    pack_run(run.root, tmp_path / "d", PackSettings(shard_size_bytes=30_720), Silent())
    samples = iter(stream(tmp_path / "d", staging=mode, prefetch_bytes=1))
    next(samples)
    with locked(tmp_path / "d"), pytest.raises(UsageError, match=f"another eaglehs is packing into {tmp_path / 'd'}"):
        pack_run(run.root, tmp_path / "d", PackSettings(shard_size_bytes=40_960), Silent())
    pack_run(run.root, tmp_path / "d", PackSettings(shard_size_bytes=40_960), Silent())
    with pytest.raises(EaglehsError, match=r"train-0000\d\.tar") as caught:
        list(samples)
    assert isinstance(caught.value, DataError | StorageError)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_is_written_again_under_a_stream_is_named(whole, tmp_path: Path, mode: str, num_workers: int):
    dataset = copy_of(whole, tmp_path / "d")
    samples = stream(dataset.root, staging=mode)
    assert len(list(samples)) == 8
    shard = dataset.shards[1]
    shard.write_bytes(shard.read_bytes())
    with pytest.raises(DatasetMismatchError, match=r"train-00001\.tar was written again after the dataset was opened"):
        list(DataLoader(samples, batch_size=None, num_workers=num_workers))
    assert_all_samples(list(stream(dataset.root, staging=mode)), dataset)


def test_a_dataset_that_is_not_whole_yet_is_named_by_both(whole: SyntheticDataset, tmp_path: Path):
    dataset = copy_of(whole, tmp_path / "d")
    manifest = dataset.folder.manifest.read_bytes()
    dataset.folder.manifest.unlink()
    assert "manifest.json" in faults(dataset)
    with pytest.raises(UsageError, match=r"holds no manifest\.json, so it is no packed dataset, or not a whole one"):
        stream(dataset.root)
    dataset.folder.manifest.write_bytes(manifest)
    (dataset.folder.data / ".train-00003.tar.1.part").write_bytes(b"half")
    assert ".train-00003.tar.1.part: an unfinished file" in faults(dataset)
