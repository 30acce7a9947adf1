"""Data parallelism (`--dp-size 2`) on real SGLang on the CPU: two replicas dump into one folder, each row is right."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.extraction.capture_settings import CaptureSettings
from eaglehs.extraction.server import attached_server
from eaglehs.extraction.server_checks import Expected
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.dump import CaptureStatus
from eaglehs.schemas.progress import Silent

from tests.factories.models import LLAMA_VOCAB, write_tiny_llama
from tests.sglang_cpu.agreement import assert_as_exact, assert_right_rows
from tests.sglang_cpu.dumps import read_captured
from tests.sglang_cpu.reference import ReferenceModel
from tests.sglang_cpu.server import SglangServer

from .conftest import CpuRig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LAYERS = (1, 4, 6)
FLAGS = ("--dp-size", "2", "--chunked-prefill-size", "64", "--disable-radix-cache")
_LOG_PATIENCE_S = 20


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(3, LLAMA_VOCAB), k=num_tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def server(cpu_rig: CpuRig, model: Path, spool: Path) -> Iterator[SglangServer]:
    capture = CaptureSettings(dump_dir=spool, layers=LAYERS)
    rig = replace(cpu_rig, environment={**cpu_rig.environment, **cores_for_two(cpu_rig)})
    with rig.serve(model, *FLAGS, capture=capture) as running:
        yield running


def cores_for_two(rig: CpuRig) -> dict[str, str]:
    """Since 0.5.19 SGLang binds each replica to cores of its own, and knows none for a second one unless it is told."""
    if rig.release < (0, 5, 19):
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


def test_each_replica_gives_the_rows_that_transformers_computes(server: SglangServer, spool: Path, model: Path) -> None:
    prompts = {f"eh-many-p{i}-0": prompt_of(7 + 11 * i) for i in range(16)}
    answers = server.generate_all(prompts)
    reference = ReferenceModel(model)
    pairs = [(read_captured(spool, rid, len(prompt)), reference.of(prompt)) for rid, prompt in prompts.items()]
    for (rid, prompt), (captured, expected) in zip(prompts.items(), pairs, strict=True):
        assert_right_rows(captured, expected, prompt, answers[rid])
    assert_as_exact(pairs, yardsticks=[])
    assert busy_replicas(server) == {"DP0", "DP1"}, "one replica did all the work: nothing was shown"


def busy_replicas(server: SglangServer, *, since: int = 0) -> set[str]:
    """Return the replicas that ran a batch; a replica may write its line some time after it has answered."""
    deadline = time.monotonic() + _LOG_PATIENCE_S
    while True:
        busy = set(re.findall(r"(DP\d)[^\]]*\] Prefill batch", server.log.read_text()[since:]))
        if len(busy) > 1 or time.monotonic() > deadline:
            return busy
        time.sleep(0.1)


def test_the_status_is_ready_for_both(server: SglangServer, spool: Path) -> None:
    assert read_record(CaptureStatus, spool / CaptureStatus.FILENAME).state == "ready"


def test_the_checks_pass_and_each_replica_is_tried_alone(server: SglangServer, spool: Path, model: Path) -> None:
    expected = Expected(model=str(model), layers=LAYERS, rid_prefix="eh-run1-", dump_dir=spool)
    before = len(server.log.read_text())
    with attached_server(str(server.http.base_url), expected, Silent()):
        assert busy_replicas(server, since=before) == {"DP0", "DP1"}
    assert not list(spool.glob("eh-run1-*"))
