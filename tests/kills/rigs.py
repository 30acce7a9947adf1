"""The engines that extractions are killed on: real SGLang on the CPU, kept up or started each time; transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from eaglehs.extraction.server_environment import choose_port

from tests.eaglehs.cli import ENTRY, PLAIN
from tests.factories.models import write_tiny_llama
from tests.fakes.sglang_server import HIDDEN, Faults, fake_site, to_environment
from tests.sglang_cpu.rig import cpu_environment

from .cases import TWO_STEP, Case, Victim, write_prompts
from .matrix import Rig, Unbroken, make_unbroken

SGLANG_ARGS = ("--chunked-prefill-size", "64", "--max-total-tokens", "4096")
_START_TIMEOUT_S = 300

REFERENCE = Case(
    number=-1, mode=TWO_STEP, victim=Victim.CLIENT, has_own_server=False, concurrency=1, num_finished=0, delay_s=0
)


def sglang_rig(python: Path, folder: Path) -> Rig:
    """Return a rig for real SGLang; sets the variables that its servers inherit, so call it before any command."""
    os.environ.update({**cpu_environment(python, folder / "rig"), **PLAIN})
    spool = Path(tempfile.mkdtemp(prefix="eaglehs-kills-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    options = ("--engine", "sglang", "--profile", "cpu", "--sglang-python", str(python))
    rig = plain_rig(folder, (*options, "--dump-dir", str(spool / "own")))
    return replace(rig, sglang_args=SGLANG_ARGS, attached=("--dump-dir", str(spool / "kept")))


def plain_rig(folder: Path, engine: tuple[str, ...]) -> Rig:
    """Return a rig for any engine."""
    write_prompts(folder / "prompts.jsonl")
    model = write_tiny_llama(folder / "model")
    return Rig(model=model, prompts=folder / "prompts.jsonl", folder=folder, engine=engine)


def fake_rig(folder: Path) -> Rig:
    """Return a rig for the fake server (tests/fakes/sglang_server.py), each extraction with one of its own."""
    write_prompts(folder / "prompts.jsonl")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": HIDDEN,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    path = os.pathsep.join((str(fake_site(folder / "site")), os.environ.get("PYTHONPATH", "")))
    return Rig(
        model=folder / "model",
        prompts=folder / "prompts.jsonl",
        folder=folder,
        engine=("--engine", "sglang", "--sglang-python", sys.executable, "--dump-dir", str(folder / "spool")),
        layers=(1, 2),
        environment={**PLAIN, "PYTHONPATH": path, **to_environment(Faults(forks="child", answer_delay_s=0.02))},
    )


@contextmanager
def kept_server(rig: Rig) -> Iterator[tuple[Rig, Unbroken]]:
    """Keep one server up; yield the rig that uses it, and the unbroken dataset that it made."""
    port = choose_port("127.0.0.1", None)
    dump_dir = rig.attached[-1]
    python = rig.engine[rig.engine.index("--sglang-python") + 1]
    command = [*ENTRY, "serve", "--model", rig.model, "--layers", "1,4,6", "--profile", "cpu", "--port", port]
    command += ["--dump-dir", dump_dir, "--sglang-python", python, "--", *SGLANG_ARGS]
    with (rig.folder / "serve.txt").open("w") as out:
        server = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out, cwd=rig.folder)
    try:
        _wait_until_ready(server, rig.folder / "serve.txt")
        attached = replace(rig, attached=("--server", f"http://127.0.0.1:{port}", *rig.attached))
        yield attached, make_unbroken(attached, REFERENCE, rig.folder / "unbroken")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        shutil.rmtree(Path(dump_dir).parent, ignore_errors=True)


def _wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `serve` says so: its own trial is over then, and no request of others shares a batch with a sample."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "ready at http" not in log.read_text():
        assert server.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, f"no server in {_START_TIMEOUT_S} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)


TRANSFORMERS = ("--engine", "transformers")
