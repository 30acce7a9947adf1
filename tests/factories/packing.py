"""Packs a small run in memory, step by step as the formats say."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from eaglehs.builder.plan import DatasetLayout, PlannedSample, plan_dataset
from eaglehs.builder.tar_writer import ShardWriter
from eaglehs.schemas.atomic import staged
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.manifest import DatasetFolder, Manifest, ShardEntry, Totals
from eaglehs.schemas.sample import SampleMeta

from tests.factories.runs import SyntheticRun


def pack_by_hand(run: SyntheticRun, root: Path, shard_size_bytes: int) -> None:
    folder = DatasetFolder(root)
    folder.data.mkdir(parents=True)
    folder.index.parent.mkdir()
    layout = DatasetLayout(layers=run.record.layers, hidden_size=run.record.model.hidden_size)
    planned = [PlannedSample(key=p.key, id=p.id, source=p.source, num_tokens=p.num_tokens) for p in run.prompts]
    plan = plan_dataset(planned, layout, shard_size_bytes=shard_size_bytes)
    entries, rows = [], []
    for shard in (shard.without(run.failed) for shard in plan.shards):
        path = folder.shard(shard.name)
        with staged(path) as out:
            writer = ShardWriter(out, shard)
            for placed in shard.samples:
                bits = run.bits(placed.key)
                hashes = {name: xxhash.xxh3_128_hexdigest(array.tobytes()) for name, array in bits.items()}
                meta = SampleMeta(
                    key=placed.key,
                    id=placed.sample.id,
                    source=placed.sample.source,
                    num_tokens=placed.sample.num_tokens,
                    num_trainable=int(bits["loss_mask"].sum()),
                    next_token=run.next_tokens[placed.key],
                    xxh3_128=hashes,
                )
                arrays = {name: [array.tobytes()] for name, array in bits.items()}
                writer.write_sample(placed, meta, arrays)
                rows.append(_row(shard.name, placed, meta))
        entries.append(
            ShardEntry(
                name=shard.name,
                num_samples=len(shard.samples),
                num_tokens=shard.num_tokens,
                size_bytes=shard.size_bytes,
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            )
        )
    metadata = {"eaglehs.kind": "eaglehs.index", "eaglehs.version": "1"}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), folder.index)
    write_record(folder.manifest, _manifest(run, entries, shard_size_bytes))


def _row(shard: str, placed, meta: SampleMeta) -> dict[str, object]:
    row: dict[str, object] = {"shard": shard, "key": meta.key, "id": meta.id, "source": meta.source}
    row |= {"num_tokens": meta.num_tokens, "num_trainable": meta.num_trainable, "next_token": meta.next_token}
    for member in placed.members[1:]:
        row[f"{member.array}.offset"] = member.data_offset
        row[f"{member.array}.length"] = member.data_bytes
        row[f"{member.array}.xxh3_128"] = meta.xxh3_128[member.array]
    return row


def _manifest(run: SyntheticRun, entries: list[ShardEntry], shard_size_bytes: int) -> Manifest:
    record = run.record
    packed = [prompt for prompt in run.prompts if prompt.key not in run.failed]
    return Manifest(
        run_id=record.run_id,
        created_at=record.created_at,
        eaglehs_version=record.eaglehs_version,
        model=record.model,
        layers=record.layers,
        prompts=record.prompts,
        engine=record.engine,
        shard_size_bytes=shard_size_bytes,
        shuffle_seed=None,
        failed={"failed": len(run.failed)} if run.failed else {},
        state_norms={},
        totals=Totals(
            num_samples=len(packed),
            num_tokens=sum(p.num_tokens for p in packed),
            num_trainable=int(sum(np.sum(p.loss_mask) for p in packed)),
            size_bytes=sum(entry.size_bytes for entry in entries),
        ),
        shards=tuple(entries),
    )
