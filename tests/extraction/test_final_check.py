"""The engine's own next token against the LM head's: right rows go on, wrong ones stop the run at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from eaglehs.extraction.client import Client, ClientSettings
from eaglehs.extraction.engines.protocol import Answer
from eaglehs.extraction.final_check import FinalCheck, WrongFinalError
from eaglehs.extraction.lm_head import LmHead, NoHeadError, open_lm_head
from eaglehs.extraction.model_facts import read_model_facts
from eaglehs.extraction.run_store import open_store
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.run import RunFolder
from safetensors.torch import load_file, save_file

from tests.factories.dumps import write_dumps
from tests.factories.model_runs import Computed, make_model_prompts
from tests.factories.models import write_tiny_llama
from tests.factories.runs import make_record
from tests.fakes.engine import FakeEngine

HIDDEN = 128


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


def prompts():
    return make_model_prompts({f"p{number}": 5 + number for number in range(6)}, vocab_size=500)


class RealRowsEngine(FakeEngine):
    """Gives what a real model computes, with a fault put into `final`."""

    def __init__(self, spool: Path, model: Path, fault):
        super().__init__(spool, layers=(2, 4, 5), hidden_size=HIDDEN, concurrency=1)
        self.model, self.fault = model, fault

    async def capture(self, prompt, rid):
        computed = Computed(self.model, prompt)
        dumps = write_dumps(self.spool, prompt, computed.states(final=self.fault(computed)), rid=rid)
        return Answer(dumps=tuple(dumps), next_token=computed.next_token, cached_tokens=0)


def run_with(engine: RealRowsEngine, folder: Path, model: Path, notes: list[str]):
    from eaglehs.builder.assemble import check_dumps
    from eaglehs.builder.plan import DatasetLayout

    final_check = FinalCheck(read_model_facts(str(model)), notes.append)

    def check(prompt, answer):
        checked = check_dumps(prompt, answer.dumps, DatasetLayout(layers=(2, 4, 5), hidden_size=HIDDEN))
        final_check.check(prompt, answer)
        return checked

    store = open_store(RunFolder(folder), make_record(prompts(), layers=(2, 4, 5), hidden_size=HIDDEN), prompts())
    store.begin(engine.facts)
    return asyncio.run(Client(engine, store, check, ClientSettings()).run(prompts(), Silent()))


def test_right_rows_go_through_without_a_word(llama, tmp_path):
    notes: list[str] = []
    engine = RealRowsEngine(tmp_path / "spool", llama, lambda computed: computed.hidden_states[-1])
    (tmp_path / "run").mkdir()
    assert run_with(engine, tmp_path / "run", llama, notes).num_done == 6
    assert notes == []


@pytest.mark.parametrize(
    "fault",
    [
        lambda computed: computed.before_norm * torch.linspace(-1, 3, HIDDEN).to(torch.bfloat16),
        lambda computed: computed.hidden_states[-1].roll(1, 0),
        lambda computed: computed.hidden_states[3],
    ],
    ids=["another norm", "shifted rows", "another layer"],
)
def test_a_wrong_final_stops_the_run_before_its_third_sample_is_kept(fault, llama, tmp_path):
    notes: list[str] = []
    (tmp_path / "run").mkdir()
    engine = RealRowsEngine(tmp_path / "spool", llama, fault)
    with pytest.raises(WrongFinalError, match=r"2 of \d samples checked.*not the LM head's input.*shifted") as caught:
        run_with(engine, tmp_path / "run", llama, notes)
    assert caught.value.exit_code == 3
    ledger = tmp_path / "run" / "ledger.jsonl"  # not there where the engine was so quick that no sample was kept yet
    assert not ledger.exists() or len(ledger.read_text().splitlines()) <= 3
    assert notes[0].startswith("warning: p")


def test_without_the_heads_file_the_check_is_left_out_with_one_note(llama, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((llama / "config.json").read_text())
    notes: list[str] = []
    engine = RealRowsEngine(tmp_path / "spool", llama, lambda computed: computed.hidden_states[-1].roll(1, 0))
    (tmp_path / "run").mkdir()
    assert run_with(engine, tmp_path / "run", bare, notes).num_done == 6
    assert len(notes) == 1
    assert notes[0].startswith("next tokens are not held against `final`: model.safetensors can't be read")


def write_head(folder: Path, source: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    import json

    folder.mkdir()
    found = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, **config}))
    save_file(tensors, folder / "model-00002.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("lm_head.weight", {}),
        ("language_model.lm_head.weight", {}),
        ("language_model.model.embed_tokens.weight", {"tie_word_embeddings": True}),
        ("model.embed_tokens.weight", {"tie_word_embeddings": True}),
    ],
)
def test_the_head_is_found_in_shards_under_each_of_its_names(name, config, llama, tmp_path):
    weight = load_file(llama / "model.safetensors")["lm_head.weight"]
    padded = torch.cat([weight, torch.zeros(64, HIDDEN, dtype=torch.bfloat16)])
    folder = write_head(tmp_path / "m", llama, {name: padded}, **config)
    head = open_lm_head(read_model_facts(str(folder)))
    assert torch.equal(head.weight, weight)


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "config", "reason"),
    [
        ("model.embed_tokens.weight", torch.bfloat16, 512, {"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ("lm_head.weight", torch.int8, 512, {}, "quantized"),
        ("lm_head.weight", torch.bfloat16, 500, {}, "has shape"),
        ("lm_head.weight", torch.bfloat16, 512, {"final_logit_softcapping": 30.0}, "bends its logits"),
    ],
)
def test_a_head_that_can_not_be_used_is_said_to_be_so(name, dtype, rows, config, reason, llama, tmp_path):
    folder = write_head(tmp_path / "m", llama, {name: torch.zeros(rows, HIDDEN).to(dtype)}, **config)
    with pytest.raises(NoHeadError, match=reason):
        open_lm_head(read_model_facts(str(folder)))


def test_tokens_that_are_level_in_bfloat16_both_count_as_likeliest():
    head = LmHead(weight=torch.tensor([[1.0, 0.0], [0.995, 0.0], [0.9, 0.0]]))
    state = torch.tensor([8.0, 1.0])
    assert [head.judge(token, state).is_level for token in (0, 1, 2, 99)] == [True, True, False, False]
    assert [head.judge(token, state).rank for token in (0, 1, 2)] == [0, 1, 2]


def test_logits_in_blocks_are_those_of_one_product():
    random = np.random.default_rng(0)
    weight = torch.from_numpy(random.standard_normal((300_000, 8)).astype(np.float32))
    states = torch.from_numpy(random.standard_normal((70, 8)).astype(np.float32))
    head = LmHead(weight=weight)
    assert torch.allclose(head.logits(states), states @ weight.T)
    assert torch.equal(head.likeliest(states), (states @ weight.T).argmax(-1))
