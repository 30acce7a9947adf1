"""Prompts to `run/prompts.parquet`; the form is in schemas/prompt.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..schemas.atomic import staged
from ..schemas.counts import counted
from ..schemas.errors import DataError
from ..schemas.prompt import PROMPTS_KIND, PROMPTS_VERSION, Prompt

_GROUP_PROMPTS = 1024
_GROUP_TOKENS = 4_000_000
"""A row group is closed at either bound: at most about 20 MB are held, whatever the run's size."""


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write the prompts in order; the name appears only when the file is whole. The same prompts give the same bytes.

    Raises:
        DataError: a prompt whose loss mask is not as long as its ids.
    """
    schema = _schema()
    with staged(path) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for group in _groups(prompts):
            writer.write_table(_table(group, schema), row_group_size=len(group))


def _schema() -> Any:
    fields = [
        ("key", pa.string()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
    return pa.schema(fields, metadata={"eaglehs.kind": PROMPTS_KIND, "eaglehs.version": str(PROMPTS_VERSION)})


def _groups(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    group: list[Prompt] = []
    num_tokens = 0
    for prompt in prompts:
        if len(prompt.loss_mask) != prompt.num_tokens:
            raise DataError(
                f"prompt {prompt.key} has a loss mask of {len(prompt.loss_mask):,} for "
                f"{counted(prompt.num_tokens, 'id')}",
                mend="Cut ids and mask together",
            )
        group.append(prompt)
        num_tokens += prompt.num_tokens
        if len(group) == _GROUP_PROMPTS or num_tokens >= _GROUP_TOKENS:
            yield group
            group, num_tokens = [], 0
    if group:
        yield group


def _table(group: list[Prompt], schema: Any) -> Any:
    offsets = np.cumsum([0, *(prompt.num_tokens for prompt in group)], dtype=np.int32)
    ids = np.concatenate([np.asarray(prompt.input_ids, np.int32) for prompt in group])
    masks = np.concatenate([np.asarray(prompt.loss_mask, np.uint8) for prompt in group])
    columns = [
        pa.array([prompt.key for prompt in group], pa.string()),
        pa.array([prompt.id for prompt in group], pa.string()),
        pa.array([prompt.source for prompt in group], pa.string()),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(masks)),
    ]
    return pa.Table.from_arrays(columns, schema=schema)
