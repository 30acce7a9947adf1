"""`verify --model` on a tiny Kimi-shaped model: right rows pass, and each way of storing wrong ones is named."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.verify import verify
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.progress import Silent

import eaglehs.verify_model as verify_model_module
from eaglehs.demo.tiny_model import write_tiny_model
from eaglehs.verify_model import ModelCheck, verify_model
from tests.factories.model_runs import LENGTHS, Computed, make_model_run
from tests.factories.models import write_tiny_llama


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_loaded_once():
    """What a model computes does not depend on the check that asks; one thread, since the model is tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        loaded = cache(verify_model_module._load)
        patch.setattr(verify_model_module, "_load", lambda check: loaded(ModelCheck(model=check.model)))
        yield
    torch.set_num_threads(num_threads)


def faults_of(root: Path, model: Path, **options: object) -> tuple[str, ...]:
    return verify_model(root, ModelCheck(model=str(model), **options), Silent()).faults  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def right_run(tmp_path_factory, tiny_model) -> Path:
    return make_model_run(tmp_path_factory.mktemp("right") / "run", tiny_model).root


def test_a_right_run_passes_with_its_numbers(right_run, tiny_model):
    found = verify_model(right_run, ModelCheck(model=str(tiny_model)), Silent())
    assert found.faults == ()
    assert set(found.samples) == set(LENGTHS)
    assert found.num_rows == sum(LENGTHS.values())
    assert [(state.state, state.nearest) for state in found.states] == [
        ("layer_2", "hidden_states[2]"),
        ("layer_4", "hidden_states[4]"),
        ("layer_5", "hidden_states[5]"),
        ("final", "final"),
    ]
    for state in found.states:
        # Stored by transformers in bfloat16: its error is transformers' own, to the bit.
        assert state.error_median == state.own_median
        assert state.next_best_error > 3 * state.error_median
    assert (found.num_next_tokens, found.num_next_agree) == (4, 4)
    assert found.same_token_share == found.own_same_token_share
    assert found.manifest_sha256 == ""
    assert "float32 on" in found.reference


def test_a_right_dataset_passes_by_the_prefixes_of_its_samples(right_run, tiny_model, tmp_path):
    pack_run(right_run, tmp_path / "dataset", PackSettings(shard_size_bytes=60_000), Silent())
    found = verify_model(tmp_path / "dataset", ModelCheck(model=str(tiny_model), max_tokens=20), Silent())
    assert found.faults == ()
    assert found.num_rows == 9 + 20 + 20 + 20
    assert len(found.manifest_sha256) == 64


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda c: c.states(layer_4=c.hidden_states[6], layer_2=c.hidden_states[3]),
            "layer_2 holds hidden_states[3]: captured as output of layer 2, not as its input (all 4 samples checked;",
        ),
        (
            lambda c: c.states(layer_4=c.hidden_states[3]),
            "layer_4 holds hidden_states[3]: captured one layer too early, as input of layer 3 (all 4 samples checked;",
        ),
        (
            lambda c: c.states(final=c.before_norm),
            "final holds the last layer's output, before the last norm: the last norm is missing",
        ),
        (
            lambda c: c.states(final=c.normed_twice),
            "final holds the final state, normed once more: the last norm was applied twice (all 4 samples checked;",
        ),
        (
            lambda c: {name: state.roll(1, 0) for name, state in c.states().items()},
            "layer_5 holds the right state of token t-1 in row t: rows are shifted by one (all 4 samples checked;",
        ),
        (
            lambda c: {name: state.roll(-1, 0) for name, state in c.states().items()},
            "final holds the right state of token t+1 in row t: rows are shifted by one (all 4 samples checked;",
        ),
    ],
    ids=["output of the layer", "a layer early", "no norm", "two norms", "a row late", "a row early"],
)
def test_a_wrong_capture_fails_and_is_named_though_the_files_are_whole(fault, message, tiny_model, tmp_path):
    run = make_model_run(tmp_path / "run", tiny_model, fault=fault)
    assert verify(run.root, Silent()).is_good
    faults = faults_of(run.root, tiny_model)
    assert any(fault.startswith(message) for fault in faults), faults


def test_shifted_rows_and_a_missing_norm_show_in_the_next_token_too(tiny_model, tmp_path):
    run = make_model_run(tmp_path / "run", tiny_model, fault=lambda c: c.states(final=c.hidden_states[-1].roll(1, 0)))
    faults = faults_of(run.root, tiny_model)
    assert sum("the engine's next token is" in fault for fault in faults) >= 3, faults


def test_swapped_samples_name_one_another(tiny_model, tmp_path):
    run = make_model_run(tmp_path / "run", tiny_model, swap={"p1": "p3", "p3": "p1"})
    faults = faults_of(run.root, tiny_model)
    assert any(fault.startswith("layer_2 holds the rows of sample p3: samples were swapped (p1;") for fault in faults)
    assert any(fault.startswith("layer_2 holds the rows of sample p1: samples were swapped (p3;") for fault in faults)
    assert not any("p0" in fault or "p2" in fault for fault in faults)


def test_another_model_of_the_same_shape_is_told(right_run, tmp_path):
    write_tiny_model(tmp_path / "other", seed=1)
    faults = faults_of(right_run, tmp_path / "other")
    assert any(
        fault.startswith(
            "layer_2 holds nothing that this model computes for these tokens: made by another model, revision or "
            "tokenizer (all 4 samples checked;"
        )
        for fault in faults
    ), faults


def test_a_model_of_another_shape_is_refused_with_both_numbers(right_run, tmp_path):
    llama = write_tiny_llama(tmp_path / "llama")
    with pytest.raises(UsageError, match=r"vocab_size is 1024; that of .* is 512"):
        faults_of(right_run, llama)


def test_states_that_were_rounded_through_float8_are_too_far_off(tiny_model, tmp_path):
    def through_float8(computed: Computed) -> dict[str, torch.Tensor]:
        return {name: state.to(torch.float8_e5m2).to(torch.bfloat16) for name, state in computed.states().items()}

    run = make_model_run(tmp_path / "run", tiny_model, fault=through_float8)
    faults = faults_of(run.root, tiny_model)
    assert any("layer_2 is nearest to hidden_states[2] as it should be, but 0.0" in fault for fault in faults), faults
