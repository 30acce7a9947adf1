"""Datasets with a codec, made of plain ones shard by shard, so that their states may be any bits at all."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from unittest import mock

from eaglehs.builder import shard_coder
from eaglehs.builder.index_store import index_schema, index_table, read_index, write_index
from eaglehs.builder.plan import DatasetLayout
from eaglehs.builder.shard_coder import code_shard
from eaglehs.builder.verify import verify_dataset
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.manifest import DatasetFolder
from eaglehs.schemas.states import Codec

from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.readable import LENGTHS, make_readable

PLANES = Codec.PLANES_ZSTD


@contextmanager
def small_blocks(size_bytes: int = 256) -> Iterator[None]:
    """Let states of a few rows have many blocks, as large ones do."""
    with mock.patch.object(shard_coder, "STATE_BLOCK_BYTES", size_bytes):
        yield


def make_coded(root: Path, *, block_bytes: int = 256, **options: object) -> SyntheticDataset:
    """Make the dataset of `make_readable`, with a codec, in `root`/dataset."""
    return code_dataset(make_readable(root, **options), block_bytes)  # type: ignore[arg-type]


def make_good(root: Path, *, block_bytes: int = 256, **options: object) -> SyntheticDataset:
    """A dataset that `verify` finds nothing wrong with, of eight samples in four shards."""
    made = code_dataset(make_dataset(root, **({"lengths": LENGTHS} | options)), block_bytes)  # type: ignore[arg-type]
    assert verify_dataset(made.root).is_good
    return made


def code_dataset(plain: SyntheticDataset, block_bytes: int = 256) -> SyntheticDataset:
    """Recode all shards of a plain dataset, in place."""
    coded = DatasetFolder(plain.root.with_name("coded"))
    manifest = plain.manifest
    layout = DatasetLayout(layers=manifest.layers, hidden_size=manifest.model.hidden_size, codec=PLANES)
    coded.data.mkdir(parents=True)
    coded.index.parent.mkdir()
    files = {}
    for name, rows in groupby(read_index(plain.folder.index), key=lambda row: row.shard):
        whole, final = plain.folder.shard(name), coded.shard(name)
        with whole.open("rb") as source, final.open("w+b") as out, small_blocks(block_bytes):
            files[name] = code_shard(source, rows, out, layout)
    entries = [
        replace(entry, size_bytes=files[entry.name].size_bytes, sha256=files[entry.name].sha256)
        for entry in manifest.shards
    ]
    for entry in entries:
        assert hashlib.sha256(coded.shard(entry.name).read_bytes()).hexdigest() == entry.sha256
    schema = index_schema(manifest.layers, is_coded=True)
    with coded.index.open("wb") as out:
        write_index(out, [index_table([row for file in files.values() for row in file.rows], schema)], schema)
    totals = replace(manifest.totals, size_bytes=sum(entry.size_bytes for entry in entries))
    write_record(coded.manifest, replace(manifest, shards=tuple(entries), totals=totals, codec=PLANES))
    shutil.rmtree(plain.root)
    coded.root.rename(plain.root)
    write_card(plain.root)
    return plain
