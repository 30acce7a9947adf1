"""Which engine `auto` is on which machine, and that the user is told why."""

import importlib.util
from pathlib import Path

import pytest
from eaglehs.extraction.engines import choose
from eaglehs.extraction.engines.choose import choose_engine, has_gpu
from eaglehs.schemas.errors import UsageError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Sets whether SGLang is installed, and which GPUs the driver lists."""

    def be(*, sglang: bool, gpus: int) -> None:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: (object() if sglang else None) if name == "sglang" else find_spec(name),
        )
        for number in range(gpus):
            (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        monkeypatch.setattr(choose, "_DRIVER_GPUS", tmp_path / "gpus")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return be


@pytest.mark.parametrize(
    ("sglang", "gpus", "engine", "reason"),
    [
        (True, 1, "sglang", "SGLang is installed and a GPU is visible"),
        (True, 0, "transformers", "no GPU is visible"),
        (False, 1, "transformers", "SGLang is not installed"),
        (False, 0, "transformers", "SGLang is not installed"),
    ],
)
def test_auto_is_sglang_only_with_sglang_and_a_gpu(machine, sglang: bool, gpus: int, engine: str, reason: str):
    machine(sglang=sglang, gpus=gpus)
    chosen, why = choose_engine("auto")
    assert chosen == engine
    assert reason in why
    assert "\n" not in why


@pytest.mark.parametrize(("gpus", "engine"), [(1, "sglang"), (0, "transformers")])
def test_auto_takes_the_sglang_of_another_python_that_is_named(machine, gpus: int, engine: str):
    machine(sglang=False, gpus=gpus)
    chosen, why = choose_engine("auto", "/opt/sglang/bin/python")
    assert chosen == engine
    assert "--sglang-python /opt/sglang/bin/python is given" in why
    assert choose_engine("auto", "") == choose_engine("auto")  # as an empty EAGLEHS_SGLANG_PYTHON gives it


@pytest.mark.parametrize("name", ["sglang", "transformers"])
def test_an_engine_that_is_asked_for_is_taken(machine, name: str):
    machine(sglang=False, gpus=0)
    assert choose_engine(name) == (name, f"--engine {name} is given")


def test_an_unknown_engine_is_refused_with_the_choices():
    with pytest.raises(UsageError, match="'vllm' is none of auto, sglang, transformers"):
        choose_engine("vllm")


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_gpus_that_are_hidden_from_the_process_do_not_count(machine, monkeypatch: pytest.MonkeyPatch, hidden: str):
    machine(sglang=True, gpus=2)
    assert has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not has_gpu()


@pytest.mark.parametrize(
    ("listed", "code", "expected"), [("GPU 0: H200", 0, True), ("", 0, False), ("GPU 0: H200", 9, False)]
)
def test_nvidia_smi_is_asked_where_the_driver_folder_is_hidden(
    machine, tmp_path: Path, listed: str, code: int, expected: bool
):
    machine(sglang=True, gpus=0)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{listed}'\nexit {code}\n")
    smi.chmod(0o755)
    assert has_gpu() is expected
