"""The plugin in a real SGLang server on the CPU, with a Llama: right rows, of our requests alone, and nothing changed.

Two servers are started, one after the other: one without the plugin for its answers, one with it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eaglehs.extraction.capture_settings import CaptureSettings
from eaglehs.extraction.capture_status import LOCK_FILENAME
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.dump import CaptureStatus

from tests.factories.models import LLAMA_VOCAB, NUM_LAYERS, write_tiny_llama
from tests.sglang_cpu.agreement import assert_as_exact, assert_right_rows
from tests.sglang_cpu.dumps import dumps_of, read_captured
from tests.sglang_cpu.reference import Reference, ReferenceModel
from tests.sglang_cpu.server import SglangServer

from .conftest import CpuRig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LAYERS = (1, 4, 6)
CHUNK = 64
FLAGS = ("--chunked-prefill-size", str(CHUNK), "--disable-radix-cache", "--enable-mixed-chunk")
LENGTHS = (1, 13, 150, 2000)


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(3, LLAMA_VOCAB), k=num_tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model)


@pytest.fixture(scope="module")
def yardstick(reference: ReferenceModel) -> Reference:
    return reference.of(prompt_of(150))


@pytest.fixture(scope="module")
def plain_answers(cpu_rig: CpuRig, model: Path) -> dict[int, Any]:
    """What the server answers where the plugin is not installed: ids and their log-probabilities."""
    with cpu_rig.serve(model, *FLAGS, capture=None) as server:
        return {length: tokens_of(server, length) for length in LENGTHS}


@pytest.fixture(scope="module")
def server(cpu_rig: CpuRig, model: Path, spool: Path, plain_answers: dict[int, Any]) -> Iterator[SglangServer]:
    capture = CaptureSettings(dump_dir=spool, layers=LAYERS)
    with cpu_rig.serve(model, *FLAGS, capture=capture) as running:
        yield running


def tokens_of(server: SglangServer, length: int) -> Any:
    request = {
        "input_ids": prompt_of(length),
        "rid": f"eh-plain-p{length}-0",
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = server.generate_with(request).json()
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


def test_the_status_says_ready_and_what_is_captured(server: SglangServer, spool: Path) -> None:
    status = read_record(CaptureStatus, spool / CaptureStatus.FILENAME)
    assert (status.state, status.message, status.layers) == ("ready", "", LAYERS)
    assert (status.model_class, status.num_layers, status.hidden_size) == ("LlamaForCausalLM", NUM_LAYERS, 128)
    assert (status.dtype, status.rid_prefix) == ("bfloat16", "eh-")


def test_start_and_health_checks_leave_no_dump(server: SglangServer, spool: Path) -> None:
    for _ in range(2):
        assert server.http.get("/health_generate").is_success
    server.generate(prompt_of(70), rid="someone-else")
    assert sorted(path.name for path in spool.iterdir()) == [LOCK_FILENAME, CaptureStatus.FILENAME]


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
    prompts = {f"eh-many-p{i}-0": prompt_of(7 + 11 * i) for i in range(16)}
    answers = server.generate_all(prompts)
    pairs = [(read_captured(spool, rid, len(prompt)), reference.of(prompt)) for rid, prompt in prompts.items()]
    for (rid, prompt), (captured, expected) in zip(prompts.items(), pairs, strict=True):
        assert_right_rows(captured, expected, prompt, answers[rid])
    assert_as_exact(pairs, yardsticks=[])


def test_decode_steps_between_chunks_leave_no_rows(
    server: SglangServer, spool: Path, reference: ReferenceModel
) -> None:
    prompts = {f"eh-mixed-p{i}-0": prompt_of(20 + 31 * i) for i in range(8)}
    answers = server.generate_all(prompts, max_new_tokens=8)
    for rid, prompt in prompts.items():
        assert_right_rows(read_captured(spool, rid, len(prompt)), reference.of(prompt), prompt, answers[rid])
        assert max(name.end for name in dumps_of(spool, rid)) == len(prompt)
    with_decodes = re.findall(r"Prefill batch.*#running-req: [1-9]", server.log.read_text())
    assert with_decodes, "no batch mixed prefill and decode: this test showed nothing"


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_are_the_same_with_and_without_the_plugin(
    server: SglangServer, plain_answers: dict[int, Any], length: int
) -> None:
    assert tokens_of(server, length) == plain_answers[length]


@pytest.mark.parametrize("rid", ["../evil", "eh-../evil", "eh-/etc/evil-0", "eh-run-a.b-0", "eh-run-UPPER-0"])
def test_an_unsafe_request_id_writes_nothing_anywhere(server: SglangServer, spool: Path, rid: str) -> None:
    before = sorted(spool.parent.rglob("*"))
    assert server.generate(prompt_of(13), rid=rid)["output_ids"]
    server.generate(prompt_of(13), rid=f"eh-after-p{abs(hash(rid))}-0")
    read_captured(spool, f"eh-after-p{abs(hash(rid))}-0", 13)  # the writers have passed the unsafe one
    new = set(spool.parent.rglob("*")) - set(before)
    assert [path.name.startswith("eh-after-") for path in new] == [True]
    assert list(spool.parent.parent.glob("evil*")) == []


def test_the_status_is_still_ready_at_the_end(server: SglangServer, spool: Path) -> None:
    assert read_record(CaptureStatus, spool / CaptureStatus.FILENAME).state == "ready"
