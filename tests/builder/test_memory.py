"""Packing and verifying take no more memory for more data: nothing of a dump or shard is held, mapped or copied."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.factories.dumps import make_prompt, write_dumps
from tests.factories.runs import SyntheticRun, append_ledger, start_run

H, T = 7168, 2000
SAMPLE_BYTES = T * H * 2 * 4
NUM_SAMPLES = int(os.environ.get("EAGLEHS_MEMORY_TEST_GB", "1")) * 1_000_000_000 // SAMPLE_BYTES
LIMIT_BYTES = 700_000_000
"""torch and pyarrow alone are about 400 MB; the limit that is promised is 1.5 GB for a dataset of 4 GB."""

SCRIPT = """
import json, sys, time
from pathlib import Path
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.verify import verify
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.states import Codec
run, out, coded = map(Path, sys.argv[1:])
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would count the parent's before the exec
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
coded_settings = PackSettings(shard_size_bytes=400_000_000, workers=2, codec=Codec.PLANES_ZSTD)
figures = {}
for name, work in (
    ("pack", lambda: pack_run(run, out, PackSettings(shard_size_bytes=400_000_000, workers=2), Silent()).set_aside),
    ("verify dataset", lambda: verify(out, Silent(), workers=2).faults),
    ("verify run", lambda: verify(run, Silent()).faults),
    ("pack, coded", lambda: pack_run(run, coded, coded_settings, Silent()).set_aside),
    ("verify coded dataset", lambda: verify(coded, Silent(), workers=2).faults),
):
    started = time.monotonic()
    assert work() == ()
    figures[name] = {"peak_bytes": peak(), "seconds": round(time.monotonic() - started, 2)}
print(json.dumps(figures))
"""


def large_run(root: Path) -> SyntheticRun:
    prompts = [make_prompt(f"p{i}", T) for i in range(NUM_SAMPLES)]
    run = start_run(root, prompts, layers=(3, 31, 59), hidden_size=H)
    noise = torch.randn(T + NUM_SAMPLES * 4, H, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for number, prompt in enumerate(prompts):
        names = ("layer_3", "layer_31", "layer_59", "final")
        states = {name: noise[4 * number + i :][:T] for i, name in enumerate(names)}
        folder = run.folder.dump_path(prompt.key, "x").parent
        paths = write_dumps(folder, prompt, states, bounds=(0, 1024, T))
        append_ledger(run, prompt, dumps=paths)
    return run


def test_a_gigabyte_is_packed_and_verified_in_flat_memory(tmp_path: Path):
    run = large_run(tmp_path / "run")
    command = [sys.executable, "-c", SCRIPT, str(run.root), str(tmp_path / "dataset"), str(tmp_path / "coded")]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(figures)  # noqa: T201 - seen with pytest -s
    assert all(figure["peak_bytes"] < LIMIT_BYTES for figure in figures.values()), figures
    for name in ("dataset", "coded"):
        assert len(list((tmp_path / name / "data").iterdir())) == -(-NUM_SAMPLES // 3)
