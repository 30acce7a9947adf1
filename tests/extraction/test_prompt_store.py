"""prompts.parquet as schemas/prompt.py describes it, read back with pyarrow alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eaglehs.extraction import prompt_store
from eaglehs.extraction.prompt_store import write_prompts
from eaglehs.schemas.errors import DataError
from eaglehs.schemas.prompt import Prompt
from hypothesis import given, settings
from hypothesis import strategies as st


def _prompt(number: int, num_tokens: int) -> Prompt:
    ids: Any = np.arange(num_tokens, dtype=np.int32) * 7 + number
    mask: Any = (np.arange(num_tokens) % 2).astype(np.uint8)
    return Prompt(key=f"k{number}", id=f"Ü {number}", source=f"p.jsonl:{number}", input_ids=ids, loss_mask=mask)


def _rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def _expected(prompts: list[Prompt]) -> list[dict[str, Any]]:
    return [
        {
            "key": prompt.key,
            "id": prompt.id,
            "source": prompt.source,
            "input_ids": list(prompt.input_ids),
            "loss_mask": list(prompt.loss_mask),
        }
        for prompt in prompts
    ]


def test_the_columns_types_and_metadata_are_those_of_the_format(tmp_path: Path):
    write_prompts(tmp_path / "prompts.parquet", [_prompt(0, 3)])
    schema = pq.read_schema(tmp_path / "prompts.parquet")
    assert schema.names == ["key", "id", "source", "input_ids", "loss_mask"]
    assert schema.field("input_ids").type == pa.list_(pa.int32())
    assert schema.field("loss_mask").type == pa.list_(pa.uint8())
    assert schema.metadata[b"eaglehs.kind"] == b"eaglehs.prompts"
    assert schema.metadata[b"eaglehs.version"] == b"1"
    column = pq.ParquetFile(tmp_path / "prompts.parquet").metadata.row_group(0).column(3)
    assert column.compression == "ZSTD"


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 50), max_size=12), bounds=st.tuples(st.integers(1, 4), st.integers(1, 60)))
def test_any_prompts_come_back_in_order_whatever_the_row_groups(
    lengths: list[int], bounds: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("p") / "prompts.parquet"
    prompts = [_prompt(number, length) for number, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_store, "_GROUP_PROMPTS", bounds[0])
        patch.setattr(prompt_store, "_GROUP_TOKENS", bounds[1])
        write_prompts(path, iter(prompts))
    assert _rows(path) == _expected(prompts)


def test_plain_lists_are_taken_as_arrays_are(tmp_path: Path):
    prompt = Prompt(key="a", id="a", source="s", input_ids=[1, 2], loss_mask=(0, 1))
    write_prompts(tmp_path / "p.parquet", [prompt])
    assert _rows(tmp_path / "p.parquet") == _expected([prompt])


def test_the_same_prompts_give_the_same_bytes(tmp_path: Path):
    prompts = [_prompt(number, 40) for number in range(30)]
    for name in ("a", "b"):
        write_prompts(tmp_path / name, iter(prompts))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_mask_of_another_length_is_refused_and_leaves_no_file(tmp_path: Path):
    bad = Prompt(key="bad", id="bad", source="s", input_ids=[1, 2, 3], loss_mask=[1, 1])
    with pytest.raises(DataError, match="bad has a loss mask of 2 for 3 ids"):
        write_prompts(tmp_path / "p.parquet", [_prompt(0, 3), bad])
    assert list(tmp_path.iterdir()) == []


def test_prompts_are_taken_as_they_come_and_not_all_at_once(tmp_path: Path):
    held = 0
    most = 0

    def prompts() -> Iterator[Prompt]:
        nonlocal held, most
        for number in range(50):
            held += 1
            most = max(most, held)
            yield _prompt(number, 10)

    class Counted(list[Prompt]):
        pass

    table = prompt_store._table

    def counted(group: list[Prompt], schema: Any) -> Any:
        nonlocal held
        held -= len(group)
        return table(group, schema)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_store, "_GROUP_PROMPTS", 8)
        patch.setattr(prompt_store, "_table", counted)
        write_prompts(tmp_path / "p.parquet", prompts())
    assert most <= 9
    assert pq.ParquetFile(tmp_path / "p.parquet").metadata.num_rows == 50
