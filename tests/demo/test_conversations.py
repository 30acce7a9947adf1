"""The bundled conversations: each one renders, has something to train on, and together they exercise the path."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from eaglehs.schemas.keys import is_key, make_key
from transformers import AutoTokenizer

ROWS = [
    json.loads(line) for line in files("eaglehs.demo").joinpath("conversations.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_each_conversation_renders_with_tokens_to_train_on(row, tokenizer):
    rendered = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = rendered["input_ids"], rendered["assistant_masks"]
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    assert len(ids) == len(mask)
    assert 0 < sum(mask) < len(mask)
    runs_of_ones = "".join(map(str, mask)).strip("0").split("0")
    assert len([run for run in runs_of_ones if run]) == len(answers)
    assert sum(t == tokenizer.convert_tokens_to_ids("<|im_end|>") for t in ids) == len(row["messages"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_turns_alternate_and_end_with_an_answer(row):
    roles = [message["role"] for message in row["messages"]]
    spoken = roles[1:] if roles[0] == "system" else roles
    assert spoken == ["user", "assistant"] * (len(spoken) // 2)


def test_ids_and_keys_are_unique_and_some_keys_need_making():
    ids = [row["id"] for row in ROWS]
    assert len(set(ids)) == len(ids) >= 30
    assert len({make_key(sample_id) for sample_id in ids}) == len(ids)
    unsafe = [sample_id for sample_id in ids if not is_key(sample_id)]
    for pattern in (r"\.", "/", "[A-Z]", r"[^\x00-\x7f]"):
        assert any(re.search(pattern, sample_id) for sample_id in unsafe), pattern


def test_lengths_scripts_and_system_prompts_vary():
    words = sorted(len(message["content"].split()) for row in ROWS for message in row["messages"])
    systems = [row["messages"][0]["content"] for row in ROWS if row["messages"][0]["role"] == "system"]
    assert words[0] == 1
    assert sum(count >= 600 for count in words) >= 3
    assert max(systems.count(system) for system in systems) >= 3
    assert any("推" in message["content"] or "京" in message["content"] for row in ROWS for message in row["messages"])
    assert any("reasoning_content" in message for row in ROWS for message in row["messages"])
