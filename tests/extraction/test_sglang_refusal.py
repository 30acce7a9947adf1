"""What must be refused, by real SGLang: its settings after it has resolved them, and a server that goes on serving."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from eaglehs.extraction.capture_settings import CaptureSettings
from eaglehs.extraction.capture_status import LOCK_FILENAME
from eaglehs.extraction.plugin_site import make_plugin_site
from eaglehs.extraction.server_command import GRAPH_BACKENDS_SINCE
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.dump import CaptureStatus

from tests.factories.models import NUM_LAYERS, write_tiny_llama
from tests.sglang_cpu import settings_probe

from .conftest import CpuRig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

CPU = ["--attention-backend", "torch_native", "--mem-fraction-static", "0.1"]

REFUSED = {
    "--pp-size 2": "pipeline parallelism",
    "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 2": "speculative decoding",  # which 0.5.11 has on a CPU too, other than NGRAM
    "--tp-size 2 --dp-size 2 --enable-dp-attention": "data-parallel attention",
    "--tp-size 2 --attn-cp-size 2": "context parallelism",
    "--enable-two-batch-overlap": "two-batch overlap",
    "--enable-pdmux": "prefill/decode multiplexing",
    "--disaggregation-mode prefill": "disaggregated serving",
    "--tp-size 2 --moe-a2a-backend deepep": "all-to-all experts",
    "--dtype float16": "other dtype",
}

PREFILL_GRAPH = ("--cuda-graph-backend-prefill breakable", ["prefill CUDA graph"])
OLDER_PREFILL_GRAPH = (
    "--enforce-piecewise-cuda-graph --enable-breakable-cuda-graph",
    ["forced piecewise CUDA graph", "piecewise CUDA graph"],
)

ROWS = {"--chunked-prefill-size 64": 64, "--chunked-prefill-size -1": 16384}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def prefill_graph(cpu_rig: CpuRig) -> tuple[str, list[str]]:
    """The switch of a prefill graph that this release has, and the rules that see it."""
    return OLDER_PREFILL_GRAPH if cpu_rig.release < GRAPH_BACKENDS_SINCE else PREFILL_GRAPH


@pytest.fixture(scope="module")
def judged(cpu_rig: CpuRig, model: Path, prefill_graph: tuple[str, list[str]]) -> dict[str, tuple[list[str], int]]:
    """All argument lists, resolved by SGLang in one process: arguments -> (rules, rows of a batch)."""
    lists = [[*text.split(), *CPU] for text in ("", *REFUSED, prefill_graph[0], *ROWS)]
    site = make_plugin_site(cpu_rig.folder / "site")
    found = subprocess.run(
        [cpu_rig.python, settings_probe.__file__, model, json.dumps(lists)],
        env={**os.environ, **cpu_rig.environment, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("[[")]
    return {" ".join(given[: -len(CPU)]): (rules, rows) for given, rules, rows in lines}


@pytest.mark.parametrize(("arguments", "rule"), REFUSED.items())
def test_a_setting_that_would_spoil_rows_is_seen_after_sglang_has_resolved_it(
    judged: dict[str, tuple[list[str], int]], arguments: str, rule: str
) -> None:
    assert judged[arguments][0] == [rule]


def test_a_graph_for_prefill_is_seen_under_the_switch_that_the_release_has(
    judged: dict[str, tuple[list[str], int]], prefill_graph: tuple[str, list[str]]
) -> None:
    arguments, rules = prefill_graph
    assert judged[arguments][0] == rules


def test_plain_settings_are_let_through(judged: dict[str, tuple[list[str], int]]) -> None:
    assert judged[""][0] == []


@pytest.mark.parametrize(("arguments", "rows"), ROWS.items())
def test_the_ring_learns_how_many_rows_a_batch_may_have(
    judged: dict[str, tuple[list[str], int]], arguments: str, rows: int
) -> None:
    assert judged[arguments] == ([], rows)


def test_a_refused_capture_says_why_and_the_server_serves(cpu_rig: CpuRig, model: Path, spool: Path) -> None:
    capture = CaptureSettings(dump_dir=spool, layers=(1, NUM_LAYERS))
    with cpu_rig.serve(model, "--disable-radix-cache", capture=capture) as server:
        status = read_record(CaptureStatus, spool / CaptureStatus.FILENAME)
        assert status.state == "failed"
        assert f"layer {NUM_LAYERS} is out of range: the model has {NUM_LAYERS} decoder layers" in status.message
        answer = server.generate([5, 6, 7, 8], rid="eh-run-a-0", max_new_tokens=4)
        assert len(answer["output_ids"]) == 4
        assert sorted(path.name for path in spool.iterdir()) == [LOCK_FILENAME, CaptureStatus.FILENAME]
        assert "Capture of hidden states has stopped; the server goes on" in server.log.read_text()
