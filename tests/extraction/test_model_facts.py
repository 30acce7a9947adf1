"""A model's facts from its config.json, local or on a loopback Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from eaglehs.extraction.model_facts import ModelConfigError, facts_from_config, read_model_facts
from eaglehs.schemas.errors import UsageError

TEXT = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "max_position_embeddings": 262144}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TEXT}


def _facts(config: dict[str, Any]) -> tuple[str, int, int, int, int]:
    facts = facts_from_config(config, name="m", revision="r")
    return facts.architecture, facts.num_layers, facts.hidden_size, facts.vocab_size, facts.max_position


def test_a_plain_config_is_read():
    assert _facts(LLAMA) == ("LlamaForCausalLM", 61, 7168, 163840, 262144)


@pytest.mark.parametrize("nested", ["text_config", "language_config", "llm_config"])
def test_the_language_model_inside_a_model_of_several_parts_is_meant(nested: str):
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "hidden_size": 1152}
    text = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **TEXT}
    config = {**outer, nested: text, "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}}
    assert _facts(config) == ("KimiK25ForConditionalGeneration", 61, 7168, 163840, 262144)


def test_a_field_that_only_the_whole_has_is_taken_from_there():
    config = {
        "architectures": ["X"],
        "vocab_size": 99,
        "text_config": {k: v for k, v in TEXT.items() if k != "vocab_size"},
    }
    assert _facts(config)[3] == 99


def test_a_thinker_around_a_text_config_is_opened_twice():
    assert _facts({"architectures": ["Omni"], "thinker_config": {"text_config": TEXT, "hidden_size": 5}})[2] == 7168


def test_older_field_names_are_known():
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 12,
        "n_embd": 768,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    assert _facts(config) == ("GPT2LMHeadModel", 12, 768, 50257, 1024)


def test_the_model_type_stands_in_for_a_missing_architecture():
    assert _facts({"model_type": "llama", **TEXT})[0] == "llama"
    with pytest.raises(ModelConfigError, match="neither architectures nor model_type"):
        _facts(TEXT)


@pytest.mark.parametrize("field", sorted(TEXT))
def test_a_missing_field_is_named(field: str):
    with pytest.raises(ModelConfigError, match=f"m: config.json has no {field}"):
        _facts({key: value for key, value in LLAMA.items() if key != field})


@pytest.mark.parametrize("value", [0, -1, "61", 61.0, True])
def test_a_number_that_is_none_is_named_with_its_value(value: Any):
    with pytest.raises(ModelConfigError, match="num_hidden_layers = "):
        _facts({**LLAMA, "num_hidden_layers": value})


def test_the_revision_of_a_folder_follows_its_config_and_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    first = read_model_facts(str(tmp_path)).revision
    assert first.startswith("local-")
    (tmp_path / "README.md").write_text("no weights")
    assert read_model_facts(str(tmp_path)).revision == first
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert read_model_facts(str(tmp_path)).revision != first


def test_a_folder_without_config_says_what_it_holds(tmp_path: Path):
    (tmp_path / "adapter.bin").touch()
    with pytest.raises(UsageError, match=r"without config.json \(it holds adapter.bin\)"):
        read_model_facts(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", b"\xff"])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, content: str | bytes):
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        read_model_facts(str(tmp_path))


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "a/b/c", ""])
def test_a_path_that_is_not_there_is_no_question_to_the_hub(name: str):
    with pytest.raises(UsageError, match="neither a folder nor the name of a model"):
        read_model_facts(name)


class _Hub(BaseHTTPRequestHandler):
    """Gives config.json of `org/model`; says 404 to all else."""

    def _answer(self, *, is_get: bool) -> None:
        content = json.dumps(LLAMA).encode()
        is_known = self.path.startswith("/org/model/resolve/main/config.json")
        self.send_response(200 if is_known else 404)
        if is_known:
            self.send_header("ETag", '"0123"')
            self.send_header("Content-Length", str(len(content)))
        else:
            is_file = self.path.startswith("/org/empty/")
            self.send_header("X-Error-Code", "EntryNotFound" if is_file else "RepoNotFound")
            self.send_header("Content-Length", "0")
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if is_get and is_known:
            self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer(is_get=True)

    def do_HEAD(self) -> None:
        self._answer(is_get=False)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


_SCRIPT = """
import sys
from eaglehs.extraction.model_facts import read_model_facts
from eaglehs.schemas.errors import EaglehsError
for name in sys.argv[1:]:
    try:
        facts = read_model_facts(name)
        print(name, facts.revision, facts.num_layers)
    except EaglehsError as error:
        print(name, type(error).__name__, error)
"""


def _ask(cache: Path, names: list[str], **environment: str) -> list[str]:
    # a process of its own: huggingface_hub reads its settings once, at import
    settings = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings |= {"HF_HOME": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *names], env=settings, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


def test_the_hub_gives_the_commit_and_faults_are_storage_errors(hub: str, tmp_path: Path):
    found = _ask(tmp_path, ["org/model", "org/other", "org/empty"], HF_ENDPOINT=hub)
    assert found[0] == f"org/model {COMMIT} 61"
    assert found[1].startswith("org/other StorageError the Hub did not give org/other.")
    assert found[2].startswith("org/empty ModelConfigError org/empty on the Hub has no config.json")
    offline = _ask(tmp_path, ["org/model", "org/other"], HF_HUB_OFFLINE="1")
    assert offline[0] == found[0], "what the cache has needs no network"
    assert offline[1].startswith("org/other StorageError org/other is no local folder, not in the Hub cache")
