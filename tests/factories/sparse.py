"""Datasets of the reference run's size whose states are holes: structure, index and manifest as real ones have them."""

from dataclasses import replace
from pathlib import Path

from eaglehs.builder.index_store import index_schema, index_table, write_index
from eaglehs.builder.plan import META, DatasetLayout, PlacedSample, PlannedSample, plan_dataset
from eaglehs.builder.tar_writer import FileRange, ShardWriter
from eaglehs.cards.write import write_card
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.index import ArrayPlace, IndexRow
from eaglehs.schemas.manifest import DatasetFolder, ShardEntry, Totals
from eaglehs.schemas.published import published_manifest
from eaglehs.schemas.sample import SampleMeta

from tests.factories.manifests import make_manifest

HIDDEN_SIZE, LAYERS = 7168, (3, 31, 59)


class HeadersOnly(ShardWriter):
    """Leaves the arrays as holes."""

    def _write_pieces(self, member, pieces) -> None:
        if member.array == META:
            super()._write_pieces(member, pieces)


def make_sparse_dataset(root: Path, *, num_samples: int, num_tokens: int, shard_size_bytes: int) -> DatasetFolder:
    """Make a dataset whose shards have the size of real ones and take a few kilobytes each."""
    folder, layout = DatasetFolder(root), DatasetLayout(layers=LAYERS, hidden_size=HIDDEN_SIZE)
    folder.data.mkdir(parents=True)
    folder.index.parent.mkdir()
    samples = [PlannedSample(key=f"s{n}", id=f"s{n}", source="x", num_tokens=num_tokens) for n in range(num_samples)]
    entries, rows = [], []
    for shard in plan_dataset(samples, layout, shard_size_bytes=shard_size_bytes).shards:
        with folder.shard(shard.name).open("w+b") as out:
            writer = HeadersOnly(out, shard)
            rows += [_write(writer, placed, shard.name) for placed in shard.samples]
        counts = {"num_samples": len(shard.samples), "num_tokens": shard.num_tokens, "size_bytes": shard.size_bytes}
        entries.append(ShardEntry(name=shard.name, sha256=f"{shard.number:064x}", **counts))
    with folder.index.open("wb") as out:
        schema = index_schema(LAYERS)
        write_index(out, [index_table(rows, schema)], schema)
    totals = Totals(
        num_samples=num_samples,
        num_tokens=num_samples * num_tokens,
        num_trainable=num_samples,
        size_bytes=sum(entry.size_bytes for entry in entries),
    )
    model = replace(make_manifest().model, hidden_size=HIDDEN_SIZE)
    manifest = make_manifest(shards=tuple(entries), totals=totals, model=model)
    write_record(folder.manifest, published_manifest(manifest))
    write_card(root)
    return folder


def _write(writer: ShardWriter, placed: PlacedSample, shard: str) -> IndexRow:
    arrays = [member for member in placed.members if member.array != META]
    sample = placed.sample
    counts = {"num_tokens": sample.num_tokens, "num_trainable": 1, "next_token": 7}
    hashes = {member.array: "0" * 32 for member in arrays}
    meta = SampleMeta(key=sample.key, id=sample.id, source=sample.source, xxh3_128=hashes, **counts)
    holes = {member.array: [FileRange(path=Path(), handle=-1, offset=0, length=member.data_bytes)] for member in arrays}
    writer.write_sample(placed, meta, holes)
    places = {
        member.array: ArrayPlace(offset=member.data_offset, length=member.data_bytes, xxh3_128="0" * 32)
        for member in arrays
    }
    return IndexRow(shard=shard, key=sample.key, id=sample.id, source=sample.source, arrays=places, **counts)
