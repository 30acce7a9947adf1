"""The whole path on real SGLang from the command line: Kimi-K2's shape, chunked prefill, requests side by side."""

import json
from pathlib import Path

import pytest
import torch

import eaglehs as package
from tests.eaglehs.cli import eaglehs
from tests.sglang_cpu.rig import PYTHON_VARIABLE, cpu_environment, sglang_python

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_python() is None, reason=f"{PYTHON_VARIABLE} is not set"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    python = sglang_python()
    assert python is not None
    return cpu_environment(python, tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def datasets_of_both(tmp_path_factory, tiny_model, prompt_file, environment) -> tuple[Path, Path]:
    """The same prompts through SGLang and through transformers, packed."""
    folders = []
    for engine, options in (
        ("sglang", ("--profile", "cpu", "--concurrency", "8", "--", "--chunked-prefill-size", "64")),
        ("transformers", ()),
    ):
        folder = tmp_path_factory.mktemp(engine)
        done = eaglehs(
            "extract", "--model", tiny_model, "--prompts", prompt_file, "--limit", 16, "--engine", engine, *options,
            cwd=folder, **(environment if engine == "sglang" else {}),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert eaglehs("pack", "--shard-size", "1MB", cwd=folder).returncode == 0
        folders.append(folder)
    return folders[0], folders[1]


def test_a_dataset_made_by_sglang_verifies_and_says_how_it_was_made(datasets_of_both):
    folder, _ = datasets_of_both
    verified = eaglehs("verify", "dataset", "--json", cwd=folder)
    assert verified.returncode == 0, verified.stdout
    manifest = json.loads((folder / "dataset" / "manifest.json").read_text())
    assert manifest["engine"]["name"] == "sglang"
    assert manifest["engine"]["versions"]["sglang"].startswith("0.5.")
    assert "--disable-radix-cache" in manifest["engine"]["command"]
    assert manifest["totals"]["num_samples"] == 16


def test_states_of_sglang_and_transformers_agree_sample_by_sample(datasets_of_both):
    ours, reference = ({s["key"]: s for s in package.stream(folder / "dataset")} for folder in datasets_of_both)
    assert ours.keys() == reference.keys()
    for key, sample in ours.items():
        other = reference[key]
        assert torch.equal(sample["input_ids"], other["input_ids"])
        assert torch.equal(sample["loss_mask"], other["loss_mask"])
        for state in ("layer_2", "layer_4", "layer_5", "final"):
            # Either engine's bf16 is up to 8 % off fp32 in this random MoE model; another layer is 38 % off and more.
            assert median_error(sample[state], other[state]) < 0.2, (key, state)
        # The next-best reading is far off: the states of two layers differ by more than both engines' noise.
        assert median_error(sample["layer_4"], other["layer_5"]) > 2 * median_error(sample["layer_4"], other["layer_4"])


def median_error(states_TH: torch.Tensor, reference_TH: torch.Tensor) -> float:
    """The median over tokens: a token whose experts flip by rounding has another state, and is no fault."""
    difference = (states_TH.float() - reference_TH.float()).norm(dim=1)
    return (difference / reference_TH.float().norm(dim=1)).median().item()


def test_most_dumps_came_in_several_chunks(datasets_of_both):
    folder, _ = datasets_of_both
    lines = [json.loads(line) for line in (folder / "run" / "ledger.jsonl").read_text().splitlines()]
    assert any(len(line["dumps"]) > 1 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--speculative-algorithm", "EAGLE3"), "speculative"),
        (("--pp-size", "2"), "pipeline"),
        (("--enable-dp-attention",), "--enable-dp-attention"),
    ],
)
def test_a_server_that_would_spoil_the_states_is_refused_before_it_starts(
    arguments, reason, tiny_model, prompt_file, environment, tmp_path
):
    done = eaglehs(
        "extract", "--model", tiny_model, "--prompts", prompt_file, "--engine", "sglang", "--profile", "cpu",
        "--", *arguments, cwd=tmp_path, **environment,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert reason.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_the_numbers_of_sglang_stand_before_the_model_itself(datasets_of_both, tiny_model):
    folder, _ = datasets_of_both
    done = eaglehs("verify", "dataset", "--model", tiny_model, "--samples", 6, "--json", cwd=folder)
    found = json.loads(done.stdout)["model"]
    assert done.returncode == 0, found["faults"]
    assert [state["nearest"] for state in found["states"]] == [
        "hidden_states[2]",
        "hidden_states[4]",
        "hidden_states[5]",
        "final",
    ]
    assert found["num_next_agree"] == found["num_next_tokens"] == 6
