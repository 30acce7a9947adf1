"""Stock `datasets` reads what we pack: no import of ours, no trust flag, typed columns, every bit."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Array2D, IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from eaglehs.builder.collate import collate
from eaglehs.builder.decode import ColumnError, decode
from eaglehs.schemas.keys import make_key
from eaglehs.schemas.states import array_specs
from torch.utils.data import DataLoader

from tests.factories.datasets import SyntheticDataset
from tests.factories.readable import assert_all_samples, make_readable


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_readable(tmp_path_factory.mktemp("stock"))


def open_stream(dataset: SyntheticDataset) -> IterableDataset:
    return load_dataset(str(dataset.root), split="train", streaming=True)


def keys_of(rows: Iterable[dict]) -> list[str]:
    return [row["__key__"] for row in rows]


def test_the_folder_streams_typed_columns_bit_for_bit(dataset: SyntheticDataset):
    rows = open_stream(dataset)
    assert rows.features["layer_2.bf16.npy"] == Array2D((None, 16), "uint16")
    assert rows.num_shards == 4
    found = list(rows)
    assert keys_of(found) == dataset.keys
    assert {name: found[0][name].dtype for name in ("input_ids.npy", "loss_mask.npy", "final.bf16.npy")} == {
        "input_ids.npy": np.int32,
        "loss_mask.npy": np.uint8,
        "final.bf16.npy": np.uint16,
    }
    assert_all_samples([decode(row) for row in found], dataset)


def test_a_state_is_seen_as_bfloat16_without_a_copy_and_without_our_code(dataset: SyntheticDataset):
    row = next(iter(open_stream(dataset)))
    bits = row["final.bf16.npy"]
    state = torch.from_numpy(bits).view(torch.bfloat16)
    assert state.data_ptr() == bits.ctypes.data


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_gives_each_sample_once_bit_for_bit(dataset: SyntheticDataset, num_workers: int):
    loader = DataLoader(open_stream(dataset), batch_size=None, num_workers=num_workers)
    assert_all_samples([decode(row) for row in loader], dataset)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_makes_batches_of_stock_rows_in_the_workers(dataset: SyntheticDataset, num_workers: int):
    loader = DataLoader(open_stream(dataset), batch_size=3, num_workers=num_workers, collate_fn=collate)
    batches = list(loader)
    assert sorted(key for batch in batches for key in batch["key"]) == sorted(dataset.keys)
    assert all(batch["final"].dtype == torch.bfloat16 for batch in batches)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_beyond_the_shards_stand_idle_and_repeat_nothing(dataset: SyntheticDataset):
    loader = DataLoader(open_stream(dataset), batch_size=None, num_workers=6)
    assert sorted(row["__key__"] for row in loader) == sorted(dataset.keys)


def test_meta_has_the_users_id_and_the_checksums(dataset: SyntheticDataset):
    for row in open_stream(dataset):
        meta = row["meta.json"]
        assert meta["id"] == meta["key"] == row["__key__"]
        assert meta["num_tokens"] == len(row["input_ids.npy"])
        assert set(meta["xxh3_128"]) == set(dataset.bits(row["__key__"]))


def test_arrow_rows_are_the_same_bits(dataset: SyntheticDataset):
    for table in open_stream(dataset).with_format("arrow"):
        row = table.to_pylist()[0]
        np.testing.assert_array_equal(row["final.bf16.npy"], dataset.bits(row["__key__"])["final"])


def test_without_streaming_the_rows_are_the_same_bits(dataset: SyntheticDataset, tmp_path: Path):
    rows = load_dataset(str(dataset.root), split="train", cache_dir=str(tmp_path))
    assert len(rows) == len(dataset.keys)
    assert_all_samples([decode(row) for row in rows], dataset)
    loader = DataLoader(rows, batch_size=3, collate_fn=collate)
    assert sum(len(batch["key"]) for batch in loader) == len(dataset.keys)


def test_with_the_card_gone_types_are_guessed_and_the_bits_are_the_same(tmp_path: Path):
    dataset = make_readable(tmp_path)
    dataset.folder.card.unlink()
    rows = open_stream(dataset)
    assert_all_samples([decode(row) for row in rows], dataset)
    assert_all_samples([decode(row) for row in DataLoader(rows, batch_size=None)], dataset)


def test_opening_reads_no_shard(tmp_path: Path):
    dataset = make_readable(tmp_path)
    for shard in dataset.shards:
        shard.write_bytes(b"")
    assert open_stream(dataset).features["final.bf16.npy"] == Array2D((None, 16), "uint16")


def test_the_first_sample_comes_before_a_second_one_is_read(tmp_path: Path):
    """Without the card's features `datasets` reads five whole samples first, to guess the columns."""
    dataset = make_readable(tmp_path, lengths=[300] * 12, hidden_size=512, shard_size_bytes=10**9)
    sample_bytes = dataset.shards[0].stat().st_size // 12
    assert bytes_before_the_first_sample(dataset) < 1.5 * sample_bytes
    dataset.folder.card.unlink()
    assert bytes_before_the_first_sample(dataset) > 5 * sample_bytes


def bytes_before_the_first_sample(dataset: SyntheticDataset) -> int:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    assert next(iter(open_stream(dataset)))["__key__"] == "p0"
    return bytes_read() - before


def test_stray_files_beside_the_shards_do_not_matter(tmp_path: Path):
    dataset = make_readable(tmp_path)
    for number in range(20):
        (dataset.root / f"log-{number}.json").write_text(json.dumps({"line": number}))
        (dataset.root / "data" / f"log-{number}.jsonl").write_text(json.dumps({"line": number}))
    (dataset.root / "plots").mkdir()
    (dataset.root / "plots" / "lengths.png").write_bytes(b"\x89PNG")
    assert_all_samples([decode(row) for row in open_stream(dataset)], dataset)


def test_no_python_file_is_in_the_folder(dataset: SyntheticDataset):
    # `datasets` refuses a repository with <its name>.py at the root, and a folder may be renamed to anything
    assert not list(dataset.root.rglob("*.py"))


def test_the_folder_loads_where_our_package_is_not_imported(dataset: SyntheticDataset):
    code = (
        "import sys; from datasets import load_dataset\n"
        "rows = list(load_dataset(sys.argv[1], split='train', streaming=True))\n"
        "assert not any(name.startswith('eaglehs') for name in sys.modules)\n"
        "print(len(rows))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(dataset.root)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_ids_that_would_merge_as_keys_stay_samples_of_their_own(tmp_path: Path):
    ids = ["req.0", "req.1", "req.2", "chatcmpl-1.5/abc", "a b", "A b", "x" * 300, "__hidden", ".dot"]
    keys = [make_key(sample_id) for sample_id in ids]
    dataset = make_readable(tmp_path, lengths=dict.fromkeys(keys, 3), ids=dict(zip(keys, ids, strict=True)))
    rows = list(open_stream(dataset))
    assert keys_of(rows) == keys
    assert [row["meta.json"]["id"] for row in rows] == ids
    assert_all_samples([decode(row) for row in rows], dataset)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_split_by_node_gives_each_sample_to_one_rank(dataset: SyntheticDataset, world_size: int):
    parts = [
        keys_of(split_dataset_by_node(open_stream(dataset), rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert sorted(key for part in parts for key in part) == sorted(dataset.keys)


def test_skip_after_the_split_repeats_nothing_on_other_ranks(dataset: SyntheticDataset):
    parts = [keys_of(split_dataset_by_node(open_stream(dataset), rank, 2).skip(1)) for rank in range(2)]
    assert not set(parts[0]) & set(parts[1])
    assert len(parts[0]) + len(parts[1]) == len(dataset.keys) - 2


def test_resume_twice_in_a_row_goes_on_where_the_loop_was(dataset: SyntheticDataset):
    seen, state = [], None
    for _ in range(3):
        rows = open_stream(dataset)
        if state is not None:
            rows.load_state_dict(state)
        for row in rows:
            seen.append(row["__key__"])
            state = rows.state_dict()
            if len(seen) % 3 == 0:
                break
    assert seen == dataset.keys


def test_shard_order_shuffles_by_epoch_without_a_sample_buffer(dataset: SyntheticDataset):
    rows = open_stream(dataset).shuffle(seed=0, buffer_size=1, max_buffer_input_shards=1)
    orders = []
    for epoch in range(3):
        rows.set_epoch(epoch)
        orders.append(keys_of(rows))
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == sorted(dataset.keys) for order in orders)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_with_format_widens_the_bits_and_decode_says_so(dataset: SyntheticDataset, kind: str):
    row = next(iter(open_stream(dataset).with_format(kind)))
    with pytest.raises(ColumnError, match=r"int64 values.*with_format"):
        decode(row)


def test_our_columns_mean_to_the_reader_what_they_mean_to_us():
    taken = {*WebDataset.IMAGE_EXTENSIONS, *WebDataset.AUDIO_EXTENSIONS, *getattr(WebDataset, "VIDEO_EXTENSIONS", ())}
    for spec in array_specs((3, 31, 59), 7168):
        *middle, last = spec.member.split(".")
        assert last == "npy"
        assert spec.member == spec.member.lower()
        assert not {last, *middle[1:]} & taken
    assert {"npy", "json"} <= set(WebDataset.DECODERS)
    assert "bf16" not in WebDataset.DECODERS
