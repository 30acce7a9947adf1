"""One tiny model and one prompt file for all tests of the command."""

import json
from pathlib import Path

import pytest

from eaglehs.demo.tiny_model import write_tiny_model

WORDS = "speculative decoding drafts several tokens and lets the large model check them all in one pass"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random model of Kimi-K2's shape with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory) -> Path:
    """Thirty conversations of 20 to 200 tokens, ids that need keys made among them."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = []
    for number in range(30):
        turn = " ".join(WORDS.split()[: 3 + number % 12])
        rows.append(
            {
                "id": f"Conv.{number}/x" if number % 5 == 0 else f"conv-{number}",
                "messages": [
                    {"role": "user", "content": f"{number}: {turn}?"},
                    {"role": "assistant", "content": f"{turn.upper()} {number * 7}. {turn}"},
                ],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
