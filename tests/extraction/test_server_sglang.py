"""The whole life of a managed server with real SGLang on the CPU: start, checks, capture, stop, nothing left."""

import asyncio
import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch
from eaglehs.extraction.engines.sglang import SglangEngine
from eaglehs.extraction.profile import load_profile
from eaglehs.extraction.server import ManagedServer, managed_server
from eaglehs.extraction.server_command import ServerSettings
from eaglehs.extraction.server_http import RequestRefusedError
from eaglehs.extraction.server_ready import FIRST_TOKEN_IDS
from eaglehs.extraction.trial import TRIAL_IDS
from eaglehs.schemas.dump import DumpName, RequestId
from eaglehs.schemas.progress import Silent

from tests.extraction.test_process import is_alive
from tests.factories.models import LLAMA_VOCAB, write_tiny_llama
from tests.factories.prompts import make_prompt
from tests.sglang_cpu.rig import PYTHON_VARIABLE, cpu_environment, sglang_python

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_python() is None, reason=f"{PYTHON_VARIABLE} is not set"),
]

LAYERS = (1, 4, 6)
LENGTHS = (1, 13, 150)


def test_a_real_server_is_started_checked_used_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = sglang_python()
    assert python is not None
    for name, value in cpu_environment(python, tmp_path / "rig").items():
        monkeypatch.setenv(name, value)
    settings = ServerSettings(
        model=str(write_tiny_llama(tmp_path / "model")),
        layers=LAYERS,
        dump_dir=tmp_path / "dumps",
        rid_prefix="eh-run1-",
        profile=load_profile("cpu"),
        extra_args=("--chunked-prefill-size", "64", "--api-key", "sk-verysecret"),
        sglang_python=str(python),
        log=tmp_path / "server.log",
        start_timeout_s=300.0,
    )
    with managed_server(settings, Silent()) as server:
        assert server.facts.versions["sglang"].startswith("0.5.")
        assert server.facts.device == "cpu"
        processes = below(server.processes.pid)
        assert len(processes) >= 2  # SGLang's main process and its scheduler
        asyncio.run(use(server))
        wait_for_log(tmp_path / "server.log", "ready to roll")  # after the warm-up, where there is one
    assert not any(map(is_alive, processes))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0
    assert not (tmp_path / "dumps").exists()
    log = (tmp_path / "server.log").read_text()
    assert "'***'" in log  # SGLang prints all its settings
    assert "sk-verysecret" not in log
    computed = sum(map(int, re.findall(r"Prefill batch.*#new-token: (\d+)", log)))
    assert computed == len(FIRST_TOKEN_IDS) + len(TRIAL_IDS) + sum(LENGTHS)  # SGLang's own warm-up shares no batch


async def use(server: ManagedServer) -> None:
    """Capture prompts at once, and see one that is too long refused."""
    engine = SglangEngine(server, "eh-run1-")
    prompts = [make_prompt(f"k{length}", length, vocab_size=LLAMA_VOCAB) for length in LENGTHS]
    rids = [str(RequestId(run="run1", key=prompt.key, attempt=0)) for prompt in prompts]
    answers = await asyncio.gather(*map(engine.capture, prompts, rids))
    for prompt, rid, answer in zip(prompts, rids, answers, strict=True):
        names = [DumpName.parse(path.name) for path in answer.dumps]
        records = [torch.load(path) for path in answer.dumps]
        assert {name.rid for name in names} == {rid}
        assert [name.start for name in names] == [0, *(name.end for name in names[:-1])]
        assert torch.cat([record["input_ids"] for record in records]).tolist() == list(prompt.input_ids)
        assert answer.cached_tokens == 0
        assert 0 <= answer.next_token < LLAMA_VOCAB
    assert len(answers[-1].dumps) >= 3  # 150 tokens in chunks of 64
    too_long = make_prompt("long", 5000, vocab_size=LLAMA_VOCAB)
    with pytest.raises(RequestRefusedError, match="HTTP 400"):
        await engine.capture(too_long, str(RequestId(run="run1", key="long", attempt=0)))
    left = {name for name in os.listdir(server.dump_dir) if name.endswith(".pt")}
    assert left == {path.name for answer in answers for path in answer.dumps}


def wait_for_log(path: Path, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in path.read_text():
        assert time.monotonic() < deadline, f"no {words!r} in:\n{path.read_text()[-2000:]}"
        time.sleep(0.05)


def below(pid: int) -> list[int]:
    """Return all processes below one."""
    found, queue = [], [pid]
    while queue:
        tasks = Path(f"/proc/{queue.pop()}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        found += children
        queue += children
    return found
