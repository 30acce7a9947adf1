"""The reference: every state of a model under its right name, in both precisions, Llama and Kimi-K2's shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eaglehs.extraction import reference as module
from eaglehs.extraction.engines.model_load import ModelLoadError, ModelSource
from eaglehs.extraction.reference import Reference

from tests.factories.models import NUM_LAYERS, write_tiny_deepseek, write_tiny_llama

IDS = [5, 9, 200, 31, 7, 77, 400, 3]


@pytest.fixture(scope="module", params=[write_tiny_llama, write_tiny_deepseek], ids=["llama", "kimi"])
def folder(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_transformers_own_by_name(folder, dtype):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        wanted = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
        exact, rounded = Reference(ModelSource(model=str(folder))).compute(IDS)
        found = exact if dtype == torch.float32 else rounded
        assert found is not None
        for layer in range(NUM_LAYERS):
            assert torch.equal(found.inputs[layer], wanted[layer][0].float()), layer
        assert torch.equal(found.final, wanted[-1][0].float())
        again = model.model.norm(found.before_norm.to(dtype)).float()
        assert torch.equal(again, found.final)
        assert torch.equal(model.model.norm(wanted[-1])[0].float(), found.normed_twice)


def test_where_float32_does_not_fit_the_bfloat16_states_are_the_best_there_are(folder, monkeypatch):
    monkeypatch.setattr(module, "_free_bytes", lambda device: 1000)
    reference = Reference(ModelSource(model=str(folder)))
    exact, rounded = reference.compute(IDS)
    assert rounded is None
    assert exact.final.dtype == torch.float32
    assert "bfloat16 on" in reference.description


def test_a_folder_without_a_model_is_an_error_of_the_engine(tmp_path):
    with pytest.raises(ModelLoadError, match="transformers can't load"):
        Reference(ModelSource(model=str(tmp_path)))


def test_a_config_that_transformers_refuses_is_an_error_of_the_engine(tmp_path):
    shape = {"hidden_size": 8, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    with pytest.raises(ModelLoadError, match="transformers can't load"):
        Reference(ModelSource(model=str(tmp_path)))
