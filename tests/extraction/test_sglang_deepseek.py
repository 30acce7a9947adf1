"""The plugin in a real SGLang server on the CPU, with the DeepSeek-V3 shape of Kimi-K2, and with a prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eaglehs.extraction.capture_settings import CaptureSettings
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.dump import CaptureStatus

from tests.factories.models import write_tiny_deepseek
from tests.sglang_cpu.agreement import assert_as_exact, assert_right_rows
from tests.sglang_cpu.dumps import read_captured, wait_for_rows
from tests.sglang_cpu.reference import Reference, ReferenceModel
from tests.sglang_cpu.server import SglangServer

from .conftest import CpuRig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LAYERS = (1, 4, 6)
CHUNK = 64
FLAGS = ("--chunked-prefill-size", str(CHUNK))  # the prefix cache is on, unlike in a run
LENGTHS = (1, 13, 150, 2000)
FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN = 20, 1000


def prompt_of(num_tokens: int, *, seed: int = 0) -> list[int]:
    return random.Random(num_tokens + seed).choices(range(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN), k=num_tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_deepseek(tmp_path_factory.mktemp("model") / "deepseek")


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model)


@pytest.fixture(scope="module")
def yardstick(reference: ReferenceModel) -> Reference:
    return reference.of(prompt_of(150))


@pytest.fixture(scope="module")
def server(cpu_rig: CpuRig, model: Path, spool: Path) -> Iterator[SglangServer]:
    with cpu_rig.serve(model, *FLAGS, capture=CaptureSettings(dump_dir=spool, layers=LAYERS)) as running:
        yield running


@pytest.fixture(autouse=True)
def empty_cache(server: SglangServer) -> None:
    assert server.http.post("/flush_cache").is_success


@pytest.mark.parametrize("length", LENGTHS)
def test_every_state_is_the_one_that_transformers_computes(
    server: SglangServer, spool: Path, reference: ReferenceModel, yardstick: Reference, length: int
) -> None:
    prompt, rid = prompt_of(length), f"eh-one-p{length}-0"
    answer = server.generate(prompt, rid=rid)
    captured = read_captured(spool, rid, length)
    assert len(captured.ranges) == -(-length // CHUNK)
    expected = reference.of(prompt)
    assert_right_rows(captured, expected, prompt, answer)
    assert_as_exact([(captured, expected)], yardsticks=[yardstick])


def test_sixteen_requests_at_once_each_get_their_own_rows(
    server: SglangServer, spool: Path, reference: ReferenceModel
) -> None:
    # Each begins with a token of its own, so that the cache has nothing to share.
    prompts = {f"eh-many-p{i}-0": [FIRST_TEXT_TOKEN + i, *prompt_of(6 + 9 * i)] for i in range(16)}
    answers = server.generate_all(prompts)
    pairs = [(read_captured(spool, rid, len(prompt)), reference.of(prompt)) for rid, prompt in prompts.items()]
    for (rid, prompt), (captured, expected) in zip(prompts.items(), pairs, strict=True):
        assert_right_rows(captured, expected, prompt, answers[rid])
    assert_as_exact(pairs, yardsticks=[])


def test_a_cached_prefix_shows_as_rows_that_start_late(
    server: SglangServer, spool: Path, reference: ReferenceModel
) -> None:
    shared = prompt_of(40, seed=1)
    first, second = shared + prompt_of(20, seed=2), shared + prompt_of(20, seed=3)
    server.generate(first, rid="eh-cached-first-0")
    answer = server.generate(second, rid="eh-cached-second-0")
    assert answer["meta_info"]["cached_tokens"] == len(shared)
    read_captured(spool, "eh-cached-first-0", len(first))
    [late] = wait_for_rows(spool, "eh-cached-second-0", 20)
    assert (late.start, late.end) == (40, 60)
    record = torch.load(spool / late.filename, weights_only=True)
    assert record["input_ids"].tolist() == second[40:]
    states = reference.of(second)
    errors = states.errors_of(record["layer_4"], 4, first_row=40)
    assert float(errors.median()) < 0.2  # the right rows, though not all of them


def test_the_status_is_still_ready_at_the_end(server: SglangServer, spool: Path) -> None:
    status = read_record(CaptureStatus, spool / CaptureStatus.FILENAME)
    assert (status.state, status.model_class) == ("ready", "DeepseekV3ForCausalLM")
