"""The samples of one local shard without manifest and index: its headers are scanned, its arrays are mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from .decode import DecodedSample
from .plan import DatasetLayout
from .sample_map import load_sample
from .shard_head import layout_of, scan_shard


def local_layout(shard: str) -> DatasetLayout:
    """Return the layers and the width of the shard's samples; errors as `shard_head.layout_of`."""
    return layout_of(Path(shard))


def local_samples(
    shard: str, layout: DatasetLayout, arrays: Sequence[str], *, max_tokens: int | None = None
) -> Iterator[DecodedSample]:
    """Yield the samples of a shard in file order, `arrays` alone, as `sample_map.load_sample` gives them.

    Raises:
        TarHeaderError, NpyHeaderError, RecordError, ShardStructureError, ShardCutError: it is damaged or no shard of
            this layout.
        StorageError: it can't be opened or mapped.
    """
    path = Path(shard)
    for row in scan_shard(path, name=shard, layout=layout):
        yield {"key": row.key, **load_sample(path, row, arrays, max_tokens=max_tokens)}
