"""The example learns from a real dataset, and counts the tokens that its docstring says it counts."""

import importlib.util
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
import torch
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.schemas.progress import Silent

import eaglehs
from eaglehs.demo.tiny_model import write_tiny_model
from eaglehs.extract_run import EngineSettings, ExtractSettings, extract

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_drafter.py"
LAYERS = ["layer_2", "layer_4", "layer_5"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_drafter", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and `dataset` of eight short conversations, by the real path."""
    root = tmp_path_factory.mktemp("train")
    write_tiny_model(root / "model")
    settings = ExtractSettings(
        model=str(root / "model"),
        prompts=str(files("eaglehs.demo").joinpath("conversations.jsonl")),
        out=root / "run",
        max_tokens=100,
        limit=8,
        engine=EngineSettings(name="transformers"),
    )
    extract(settings, Silent())
    pack_run(root / "run", root / "dataset", PackSettings(shard_size_bytes=500_000), Silent())
    return root


def test_the_loss_falls_within_five_steps(example: ModuleType, folder: Path):
    losses = example.train(str(folder / "dataset"), folder / "model", steps=5, batch_size=2)
    assert len(losses) == 5
    assert losses[-1] < 0.95 * losses[0]


def test_training_repeats_by_seed(example: ModuleType, folder: Path):
    first, second = (example.train(str(folder / "dataset"), folder / "model", steps=2, batch_size=2) for _ in range(2))
    assert first == second


class Oracle:
    """A drafter that knows the target's next state, so its loss is 0 if and only if rows and targets are aligned."""

    def __init__(self, batch: dict, head_VH: torch.Tensor) -> None:
        self.batch, self.head_VH = batch, head_VH

    def __call__(self, states_BTL: torch.Tensor, next_ids_BT: torch.Tensor) -> torch.Tensor:
        assert torch.equal(states_BTL[..., :128], self.batch["layer_2"][:, :-2].float())
        assert torch.equal(next_ids_BT, self.batch["input_ids"][:, 1:-1])
        return self.batch["final"][:, 1:-1].float() @ self.head_VH.T


def first_batch(folder: Path, count: int) -> dict:
    samples = [sample for _, sample in zip(range(count), eaglehs.stream(folder / "dataset"), strict=False)]
    return eaglehs.collate(samples)


def test_states_of_t_and_token_t_plus_1_are_held_against_the_target_at_t_plus_1(example: ModuleType, folder: Path):
    _, head_VH = example.read_weights(folder / "model")
    batch = first_batch(folder, 4)
    loss, agreement = example.drafter_loss(Oracle(batch, head_VH), batch, LAYERS)
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert agreement == 1


def test_only_tokens_that_the_assistant_wrote_are_counted(example: ModuleType, folder: Path):
    _, head_VH = example.read_weights(folder / "model")
    batch = first_batch(folder, 4)
    oracle = Oracle(dict(batch), head_VH)
    spoiled_final = batch["final"].clone()
    spoiled_final[:, :-1][batch["loss_mask"][:, 1:] == 0] = 7.0  # rows that predict a token of the user, or padding
    loss, _ = example.drafter_loss(oracle, batch | {"final": spoiled_final}, LAYERS)
    assert loss.item() == pytest.approx(0, abs=1e-5)


def test_padding_changes_no_real_token(example: ModuleType, folder: Path):
    torch.manual_seed(0)
    drafter = example.Drafter(*example.read_weights(folder / "model"), num_states=3)
    samples = sorted(eaglehs.stream(folder / "dataset"), key=lambda sample: len(sample["input_ids"]))
    short, together = eaglehs.collate(samples[:1]), eaglehs.collate([samples[0], samples[-1]])
    T = short["input_ids"].shape[1]
    assert together["input_ids"].shape[1] > T
    alone, padded = (
        drafter(torch.cat([batch[layer] for layer in LAYERS], dim=-1).float(), batch["input_ids"])[0, :T]
        for batch in (short, together)
    )
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)
