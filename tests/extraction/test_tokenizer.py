"""Loading a tokenizer, and the hashes that tell two apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eaglehs.extraction.tokenizer import load_tokenizer, template_hash, tokenizer_hash
from eaglehs.schemas.errors import StorageError, UsageError

from tests.factories import tokenizers as kinds
from tests.factories.tokenizers import BytesTokenizer, fast_tokenizer, save_model_folder

_CODE = """
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.model"}
    def __init__(self, vocab_file=None, **options):
        self.vocab_file = vocab_file
        super().__init__(**options)
    @property
    def vocab_size(self):
        return 256
    def get_vocab(self):
        return {chr(i + 256): i for i in range(256)} | self.added_tokens_encoder
    def _tokenize(self, text, **_):
        return [chr(byte + 256) for byte in text.encode()]
    def _convert_token_to_id(self, token):
        return ord(token) - 256
    def _convert_id_to_token(self, index):
        return chr(index + 256)
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """A model folder whose tokenizer is code of its own, as Kimi's is."""
    folder = save_model_folder(tmp_path / "own", model_type="kimi_k2")
    (folder / "tokenization_own.py").write_text(_CODE)
    (folder / "own.model").write_bytes(b"vocabulary")
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_saved_tokenizer_comes_back_with_its_template(tmp_path: Path):
    folder = save_model_folder(tmp_path, fast_tokenizer(kinds.KIMI))
    found = load_tokenizer(str(folder))
    assert found("Hello there<|im_end|>")["input_ids"] == fast_tokenizer()("Hello there<|im_end|>")["input_ids"]
    assert found.chat_template == kinds.KIMI


def test_code_of_the_repository_is_refused_by_the_name_of_the_flag(own_code: Path):
    with pytest.raises(UsageError, match=r"code that its repository brings.*--trust-remote-code"):
        load_tokenizer(str(own_code))


def test_code_of_the_repository_runs_once_it_is_trusted(own_code: Path, monkeypatch: Any, tmp_path: Path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    found = load_tokenizer(str(own_code), trust_remote_code=True)
    assert found("ab")["input_ids"] == [97, 98]


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path):
    folder = save_model_folder(tmp_path)
    with pytest.raises(UsageError, match="no tokenizer can be read from the folder"):
        load_tokenizer(str(folder))


def test_a_tokenizer_that_the_hub_does_not_give_is_a_storage_error(monkeypatch: Any):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="tokenizer of org/missing can't be loaded"):
        load_tokenizer("org/missing")


def test_the_hash_stays_through_saving_and_use_and_copying(tmp_path: Path):
    expected = tokenizer_hash(fast_tokenizer())
    first = save_model_folder(tmp_path / "a", fast_tokenizer())
    shutil.copytree(first, tmp_path / "b")
    found = load_tokenizer(str(tmp_path / "b"))
    found("Hello", padding="max_length", max_length=9, truncation=True) if found.pad_token else found("Hello")
    found.backend_tokenizer.enable_truncation(5)
    found.backend_tokenizer.enable_padding(length=9)
    assert tokenizer_hash(found) == expected
    assert tokenizer_hash(fast_tokenizer(kinds.LLAMA)) == expected, "the template has a hash of its own"


def test_the_hash_is_the_same_in_another_process(tmp_path: Path):
    folder = save_model_folder(tmp_path, fast_tokenizer())
    code = (
        "import sys; from eaglehs.extraction.tokenizer import *; t = load_tokenizer(sys.argv[1]);"
        "print(tokenizer_hash(t), template_hash(t))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert found == [tokenizer_hash(fast_tokenizer()), template_hash(fast_tokenizer())]


def test_another_token_or_special_token_is_another_hash():
    known = {tokenizer_hash(fast_tokenizer()), tokenizer_hash(fast_tokenizer(bos=True))}
    assert len(known) == 2


def test_a_python_tokenizer_is_hashed_by_its_files_contents_and_not_their_place(tmp_path: Path):
    def hashed(place: str, content: bytes) -> str:
        path = tmp_path / place
        path.write_bytes(content)
        return tokenizer_hash(BytesTokenizer(vocab_file=str(path)))

    assert hashed("a", b"1") == hashed("b", b"1")
    assert hashed("a", b"1") != hashed("b", b"2")


def test_templates_are_told_apart_and_several_by_name_are_one():
    assert template_hash(fast_tokenizer(kinds.KIMI)) != template_hash(fast_tokenizer(kinds.LLAMA))

    class Several:
        def __init__(self, *names: str) -> None:
            self.chat_template = {name: name for name in names}

    assert template_hash(Several("a", "b")) == template_hash(Several("b", "a"))
