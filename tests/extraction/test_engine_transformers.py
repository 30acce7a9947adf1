"""The embedded engine stores hidden_states[k] and the LM head's input bit for bit, or refuses the model or prompt."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from eaglehs.extraction.engines.model_load import ModelLoadError
from eaglehs.extraction.engines.taps import Taps, UnknownBackboneError, WrongStateError, check_taps, find_backbone
from eaglehs.extraction.engines.transformers import (
    PromptRefusedError,
    TransformersEngine,
    TransformersSettings,
)
from eaglehs.schemas.dump import DumpName
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.prompt import Prompt
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from eaglehs.demo.tiny_model import write_tiny_model

LAYERS = (1, 4, 5)
VOCAB = 512


def llama_config(**changes: object) -> LlamaConfig:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaConfig(**(shape | heads | changes))


def with_random_norms(model: nn.Module) -> nn.Module:
    """Norm weights of one would let a state before the norm pass for one after it."""
    for name, weight in model.named_parameters():
        if "norm" in name and weight.dim() == 1:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(torch.bfloat16).eval()


def new_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return with_random_norms(LlamaForCausalLM(llama_config(dtype="bfloat16")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    new_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model inside a wrapper, beside a vision tower with as many layers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vision")
    tower = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        projection_dim=16,
    )
    config = LlavaConfig(vision_config=tower, text_config=llama_config(), image_token_index=VOCAB - 1, dtype="bfloat16")
    with_random_norms(LlavaForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def new_engine(model: Path, spool: Path, layers: tuple[int, ...] = LAYERS) -> TransformersEngine:
    return TransformersEngine(TransformersSettings(model=str(model), layers=layers, spool=spool, device="cpu"))


def new_prompt(ids: Sequence[int]) -> Prompt:
    return Prompt(key="a", id="a", source="test", input_ids=ids, loss_mask=[1] * len(ids))


def random_ids(count: int) -> list[int]:
    return torch.randint(VOCAB - 1, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def capture(engine: TransformersEngine, ids: Sequence[int], rid: str = "eh-run1-a-0") -> tuple[dict, int, Path]:
    answer = asyncio.run(engine.capture(new_prompt(ids), rid))
    assert answer.cached_tokens == 0
    (path,) = answer.dumps
    return torch.load(path, weights_only=True), answer.next_token, path


def load_reference(model: Path) -> nn.Module:
    auto = LlavaForConditionalGeneration if "vision" in model.name else AutoModelForCausalLM
    return auto.from_pretrained(model, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("shape", ["llama", "kimi", "vision"])
def test_states_are_output_hidden_states_bit_for_bit(shape: str, request: pytest.FixtureRequest, tmp_path: Path):
    model = request.getfixturevalue(shape)
    engine, reference = new_engine(model, tmp_path), load_reference(model)
    for count in (1, 13, 150):
        ids = random_ids(count)
        dump, next_token, path = capture(engine, ids)
        with torch.inference_mode():
            wanted = reference(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        for layer in LAYERS:
            assert torch.equal(dump[f"layer_{layer}"], wanted.hidden_states[layer][0])
        assert torch.equal(dump["final"], wanted.hidden_states[-1][0])
        assert next_token == wanted.logits[0, -1].argmax()
        assert dump["input_ids"].tolist() == ids
        assert DumpName.parse(path.name) == DumpName(rid="eh-run1-a-0", start=0, end=count)


def test_layer_0_is_the_embeddings_and_the_last_layer_is_possible(llama: Path, tmp_path: Path):
    dump, _, _ = capture(new_engine(llama, tmp_path, (0, 5)), [3, 1, 4])
    embeddings = load_reference(llama).get_input_embeddings().weight
    assert torch.equal(dump["layer_0"], embeddings[[3, 1, 4]])


def test_two_engines_write_the_same_bytes(kimi: Path, tmp_path: Path):
    ids = random_ids(40)
    first = capture(new_engine(kimi, tmp_path / "one"), ids)[2]
    second_engine = new_engine(kimi, tmp_path / "two")
    capture(second_engine, random_ids(90), "eh-run1-b-0")  # what ran before must not matter
    assert first.read_bytes() == capture(second_engine, ids)[2].read_bytes()


def test_prompts_sent_at_once_do_not_mix(llama: Path, tmp_path: Path):
    engine = new_engine(llama, tmp_path)

    async def both() -> list[Path]:
        answers = await asyncio.gather(
            *(engine.capture(new_prompt(random_ids(n)), f"eh-run1-p{n}-0") for n in range(1, 9))
        )
        return [answer.dumps[0] for answer in answers]

    for count, path in enumerate(asyncio.run(both()), start=1):
        dump = torch.load(path, weights_only=True)
        assert dump["input_ids"].tolist() == random_ids(count)
        assert len(dump["final"]) == count


def test_ids_may_be_a_numpy_array(llama: Path, tmp_path: Path):
    dump, _, _ = capture(new_engine(llama, tmp_path), np.array([5, 6, 7], dtype=np.int32))
    assert dump["input_ids"].tolist() == [5, 6, 7]


def test_nan_weights_are_left_for_the_checks_of_the_samples(llama: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.model.layers[3].mlp.down_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    dump, _, _ = capture(new_engine(tmp_path / "nan", tmp_path / "spool"), [1, 2, 3])
    assert torch.isnan(dump["layer_4"]).any()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1, VOCAB], f"token {VOCAB} at position 1 is outside the model's vocabulary of {VOCAB}"),
        ([-1], "token -1 at position 0"),
        ([1] * 257, "257 tokens are more than the model's context of 256"),
    ],
)
def test_a_prompt_that_would_run_wrong_is_refused_and_the_next_one_runs(
    ids: list[int], message: str, llama: Path, tmp_path: Path
):
    engine = new_engine(llama, tmp_path)
    with pytest.raises(PromptRefusedError, match=message):
        capture(engine, ids)
    assert not list(tmp_path.iterdir())
    capture(engine, [1, 2])


def test_a_prompt_that_does_not_fit_into_memory_is_refused_and_the_next_one_runs(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = new_engine(llama, tmp_path)
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(
            engine._model, "forward", lambda **_: torch.empty(2**60)
        )  # the CPU allocator's own error
        with pytest.raises(PromptRefusedError, match="a: 3 tokens do not fit into the memory of cpu"):
            capture(engine, [1, 2, 3])
    capture(engine, [1, 2, 3])


@pytest.mark.parametrize("layers", [(6,), (-1,), (2, 2), ()])
def test_layers_out_of_range_are_refused_before_the_weights_are_read(
    layers: tuple[int, ...], llama: Path, tmp_path: Path
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(UsageError):
        new_engine(tmp_path / "model", tmp_path / "spool", layers)


def test_a_folder_without_a_model_says_so(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="transformers can't load"):
        new_engine(tmp_path, tmp_path / "spool")


def test_missing_weights_say_so(llama: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match="transformers can't load"):
        new_engine(tmp_path, tmp_path / "spool")


def test_facts_name_versions_and_device(llama: Path, tmp_path: Path):
    facts = new_engine(llama, tmp_path).facts
    assert facts.name == "transformers"
    assert facts.versions["torch"] == torch.__version__
    assert set(facts.versions) == {"python", "torch", "transformers"}
    assert facts.device.startswith("cpu, ")


class NormsOutsideItsBackbone(LlamaForCausalLM):
    """Its hidden_states[-1] is the last layer's output before the norm, as some model files have it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.norm, self.model.norm = self.model.norm, nn.Identity()
        head = self.lm_head
        self.lm_head = nn.Sequential(self.norm, head)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head[1]


class ScalesBeforeItsHead(LlamaForCausalLM):
    """The head's input is a multiple of the normed state: `final` as stored would be off by that factor."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


class ShiftsItsLayers(LlamaForCausalLM):
    """hidden_states[k] is the output of layer k."""

    def forward(self, **inputs: object) -> object:
        output = super().forward(**inputs)
        if output.hidden_states is not None:
            output.hidden_states = output.hidden_states[1:]
        return output


class HasNoHead(LlamaForCausalLM):
    """Nothing says what the LM head's input is."""

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (NormsOutsideItsBackbone, "final is not the LM head's input"),
        (ScalesBeforeItsHead, "final is not the LM head's input"),
        (ShiftsItsLayers, r"layer_1 is not hidden_states\[1\]"),
        (HasNoHead, "has no LM head"),
    ],
)
def test_a_model_whose_states_are_not_what_they_are_called_is_refused(model_class: type, message: str):
    torch.manual_seed(0)
    model = with_random_norms(model_class(llama_config()))
    with pytest.raises(WrongStateError, match=message):
        check_taps(model, Taps(model, LAYERS, 6), VOCAB)


def test_a_float32_model_is_refused():
    model = LlamaForCausalLM(llama_config()).eval()
    with pytest.raises(WrongStateError, match=r"layer_1 is torch\.float32"):
        check_taps(model, Taps(model, LAYERS, 6), VOCAB)


def test_a_model_without_a_stack_of_that_many_layers_is_refused():
    with pytest.raises(UnknownBackboneError, match="found 0 text backbones of 7 layers"):
        find_backbone(new_llama(), 7)
