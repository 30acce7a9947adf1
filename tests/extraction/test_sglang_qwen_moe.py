"""A model whose SGLang file marks layers one by one (Qwen3-MoE): the same rows as from a list, in real SGLang."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from eaglehs.extraction.capture_settings import CaptureSettings

from tests.factories.models import LLAMA_VOCAB, write_tiny_qwen_moe
from tests.sglang_cpu.agreement import assert_as_exact, assert_right_rows
from tests.sglang_cpu.dumps import read_captured
from tests.sglang_cpu.reference import ReferenceModel

from .conftest import CpuRig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def test_layers_that_are_marked_one_by_one_give_the_states_that_transformers_computes(
    cpu_rig: CpuRig, tmp_path: Path, spool: Path
) -> None:
    model = write_tiny_qwen_moe(tmp_path / "qwen")
    reference = ReferenceModel(model)
    prompts = {f"eh-run-p{i}-0": random.Random(i).choices(range(3, LLAMA_VOCAB), k=20 + 31 * i) for i in range(8)}
    capture = CaptureSettings(dump_dir=spool, layers=(1, 4, 6))
    with cpu_rig.serve(model, "--chunked-prefill-size", "64", "--disable-radix-cache", capture=capture) as server:
        answers = server.generate_all(prompts)
        pairs = [(read_captured(spool, rid, len(prompt)), reference.of(prompt)) for rid, prompt in prompts.items()]
    for (rid, prompt), (captured, expected) in zip(prompts.items(), pairs, strict=True):
        assert_right_rows(captured, expected, prompt, answers[rid])
    assert_as_exact(pairs, yardsticks=[])
