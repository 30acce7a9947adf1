"""prompts.parquet: read back exactly, and every row that can't be right refused by number."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eaglehs.builder.prompt_table import PromptTable
from eaglehs.schemas.errors import RecordError
from eaglehs.schemas.prompt import Prompt

from tests.factories.dumps import VOCAB_SIZE, make_prompt
from tests.factories.runs import write_prompts_file


def table(path: Path) -> PromptTable:
    return PromptTable(path, vocab_size=VOCAB_SIZE)


def prompt(key: str = "a", ids=(1, 2), mask=(0, 1)) -> Prompt:
    return Prompt(key=key, id=key, source="s", input_ids=np.array(ids), loss_mask=np.array(mask))


def test_prompts_come_back_in_order_and_by_key(tmp_path: Path):
    prompts = [make_prompt(f"p{i}", 1 + i % 7, sample_id=f"Id {i}") for i in range(1300)]
    write_prompts_file(tmp_path / "p", prompts)
    with table(tmp_path / "p") as found:
        assert len(found) == 1300
        assert [sample.key for sample in found.planned()] == [p.key for p in prompts]
        assert list(found.lengths()) == [p.num_tokens for p in prompts]
        for wanted in (prompts[0], prompts[700], prompts[-1]):
            one = found.prompt(wanted.key)
            assert (one.id, one.source) == (wanted.id, wanted.source)
            assert np.array_equal(one.input_ids, wanted.input_ids)
            assert np.array_equal(one.loss_mask, wanted.loss_mask)
            assert found.num_trainable_of(wanted.key) == wanted.loss_mask.sum()
        assert found.key_of_id("Id 700") == "p700"
        assert found.key_of_id("p700") is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([prompt("a"), prompt("b.c")], r"row 1: 'b\.c' is not a key"),
        ([prompt("a"), prompt("b"), prompt("a")], "row 2: key a is already that of row 0"),
        ([prompt(ids=(), mask=())], r"row 0 \(a\): 0 token ids"),
        ([prompt(ids=(1, 2, 3))], "3 token ids and 2 mask values"),
        ([prompt(ids=(1, VOCAB_SIZE))], f"token id {VOCAB_SIZE} is outside the vocabulary"),
        ([prompt(ids=(1, -1))], "token id -1 is outside"),
        ([prompt(mask=(0, 2))], "loss mask value 2"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(tmp_path: Path, rows, message):
    write_prompts_file(tmp_path / "p", rows)
    with pytest.raises(RecordError, match=message):
        table(tmp_path / "p")


def test_files_of_another_kind_are_refused(tmp_path: Path):
    path = tmp_path / "p"
    with pytest.raises(RecordError, match="is missing"):
        table(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(RecordError, match="cut or damaged"):
        table(path)
    write_prompts_file(path, [prompt()])
    good = pq.read_table(path)
    pq.write_table(good.replace_schema_metadata({}), path)
    with pytest.raises(RecordError, match=r"expected 'eaglehs\.prompts'"):
        table(path)
    pq.write_table(good.drop_columns(["source"]), path)
    with pytest.raises(RecordError, match="column source is missing"):
        table(path)
    pq.write_table(good.set_column(3, "input_ids", pa.array([[1, 2]], pa.list_(pa.int64()))), path)
    with pytest.raises(RecordError, match="column input_ids is list"):
        table(path)
    pq.write_table(good.set_column(1, "id", pa.array([None], pa.string())), path)
    with pytest.raises(RecordError, match="row 0 has an empty cell"):
        table(path)


def test_a_cut_file_is_refused(tmp_path: Path):
    write_prompts_file(tmp_path / "p", [make_prompt(f"p{i}", 50) for i in range(50)])
    whole = (tmp_path / "p").read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "p").write_bytes(whole[:cut])
        with pytest.raises(RecordError):
            table(tmp_path / "p")
