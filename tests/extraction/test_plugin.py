"""The guest's manners: inert until asked, hooked in once, loud in its status file, never in the server's way."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eaglehs.extraction import plugin
from eaglehs.extraction.capture_settings import DUMP_DIR, LAYERS, CaptureSettings
from eaglehs.extraction.sink import DumpWriteError
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.dump import CaptureStatus
from torch import nn

from eaglehs import __version__
from tests.fakes.sglang import (
    HIDDEN,
    FakeBackbone,
    FakeBatch,
    FakeHooks,
    FakeModel,
    FakeRunner,
    ForwardMode,
    batch_of,
    install_hooks,
    run_forward,
)

A, B = "eh-run-a-0", "eh-run-b-0"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(plugin, "_guest", None)
    for name, value in CaptureSettings(dump_dir=tmp_path / "dumps", layers=(1, 4)).to_environment().items():
        monkeypatch.setenv(name, value)
    yield
    if plugin._guest is not None and plugin._guest.capture is not None:
        plugin._guest.capture.stop()


def status_in(tmp_path: Path) -> CaptureStatus:
    return read_record(CaptureStatus, tmp_path / "dumps" / CaptureStatus.FILENAME)


def dumps_in(tmp_path: Path, count: int) -> dict[str, dict[str, Any]]:
    deadline = time.monotonic() + 60
    while len(found := sorted((tmp_path / "dumps").glob("*.pt"))) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return {path.name: torch.load(path, weights_only=True) for path in found}


def hooked_in(monkeypatch: pytest.MonkeyPatch, runner: FakeRunner) -> FakeHooks:
    hooks = install_hooks(monkeypatch)
    plugin.register()
    hooks.call("load_model", "after", None, runner)
    return hooks


def test_nothing_is_touched_where_no_dump_folder_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DUMP_DIR)
    hooks = install_hooks(monkeypatch)
    plugin.register()
    assert hooks.registered == []


def test_registering_twice_hooks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = install_hooks(monkeypatch)
    plugin.register()
    plugin.register()
    assert [(target.rpartition(".srt.")[2], kind) for target, _, kind in hooks.registered] == [
        ("model_executor.model_runner.ModelRunner.load_model", "after"),
        ("model_executor.model_runner.ModelRunner.forward", "before"),
        ("model_executor.model_runner.ModelRunner.forward", "after"),
        ("model_executor.forward_batch_info.ForwardBatch.init_new", "after"),
    ]


def test_the_status_tells_the_client_what_will_be_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hooked_in(monkeypatch, FakeRunner())
    status = status_in(tmp_path)
    assert (status.state, status.message, status.layers, status.rid_prefix) == ("ready", "", (1, 4), "eh-")
    assert (status.model_class, status.num_layers, status.hidden_size) == ("FakeModel", 8, HIDDEN)
    assert (status.dtype, status.plugin_version) == ("bfloat16", __version__)


@pytest.mark.parametrize("packed", [False, True])
def test_a_forward_pass_leaves_dumps_and_the_output_that_it_would_have_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: bool
) -> None:
    runner = FakeRunner(model=FakeModel(FakeBackbone(packed=packed)))
    batch = batch_of(("warm-up", 0, 3), (A, 64, 6))
    plain = runner.model(batch)
    hooks = hooked_in(monkeypatch, runner)
    output = run_forward(hooks, runner, batch, prompts=[(A, 70), ("warm-up", 3)])
    assert torch.equal(output, plain)
    [(name, dump)] = dumps_in(tmp_path, 1).items()
    assert name == f"{A}.000064-000070.pt"
    assert dump["prompt_tokens"] == 70
    assert dump["input_ids"].tolist() == [3, 4, 5, 6, 7, 8]
    rows = torch.arange(3, 9) / 100
    for state, expected in (("layer_1", rows + 1), ("layer_4", rows + 4), ("final", -rows)):
        assert torch.equal(dump[state][:, 0], expected.bfloat16())


def test_decode_rows_between_chunks_are_not_dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner()
    hooks = hooked_in(monkeypatch, runner)
    run_forward(hooks, runner, batch_of((A, 0, 4), (B, 9, 1), mode=ForwardMode.MIXED), prompts=[(A, 9), (B, 9)])
    run_forward(hooks, runner, batch_of((B, 10, 1), mode=ForwardMode.DECODE))
    assert list(dumps_in(tmp_path, 1)) == [f"{A}.000000-000004.pt"]


def test_a_rank_that_does_not_write_hooks_in_alike_but_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = FakeRunner(tp_rank=1)
    hooks = hooked_in(monkeypatch, runner)
    assert runner.model.model.layers_to_capture == [1, 4]
    assert isinstance(run_forward(hooks, runner, batch_of((A, 0, 4))), torch.Tensor)
    assert not (tmp_path / "dumps").exists()


def test_of_two_ranks_that_share_a_model_one_writes_each_row_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank in (1, 0):
        monkeypatch.setattr(plugin, "_guest", None)  # each rank is a process of its own
        runner = FakeRunner(tp_rank=rank)
        run_forward(hooked_in(monkeypatch, runner), runner, batch_of((A, 0, 4), (B, 0, 3)))
    assert [*dumps_in(tmp_path, 2)] == [f"{A}.000000-000004.pt", f"{B}.000000-000003.pt"]
    assert status_in(tmp_path).state == "ready"


def test_a_rank_that_does_not_write_still_tells_that_it_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hooked_in(monkeypatch, FakeRunner(tp_rank=1, model=nn.Identity()))
    monkeypatch.setattr(plugin, "multiprocessing", SimpleNamespace(parent_process=lambda: "the first process"))
    monkeypatch.setattr(plugin, "_guest", None)
    hooked_in(monkeypatch, FakeRunner(tp_rank=0))
    assert status_in(tmp_path).state == "failed"


@pytest.mark.parametrize(("parent", "is_kept"), [("the server", True), (None, False)])
def test_a_status_of_an_earlier_server_is_forgotten_by_the_first_process_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parent: str | None, is_kept: bool
) -> None:
    (tmp_path / "dumps").mkdir()
    status = tmp_path / "dumps" / CaptureStatus.FILENAME
    status.write_text("left")
    install_hooks(monkeypatch)
    monkeypatch.setattr(plugin, "multiprocessing", SimpleNamespace(parent_process=lambda: parent))
    plugin.register()
    assert status.exists() == is_kept


def test_a_drafter_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner(is_draft_worker=True)
    hooked_in(monkeypatch, runner)
    assert runner.model.model.layers_to_capture == []
    assert not (tmp_path / "dumps").exists()


REFUSED_SETTINGS = [
    ({"pp_size": 2}, "pipeline parallelism"),
    ({"speculative_algorithm": "EAGLE3"}, "speculative decoding"),
    ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, "prefill CUDA graph"),
    ({"disable_piecewise_cuda_graph": False}, "piecewise CUDA graph"),
    ({"enable_dp_attention": True}, "data-parallel attention"),
    ({"attn_dp_size": 2}, "data-parallel attention"),
    ({"attn_cp_size": 2}, "context parallelism"),
    ({"enable_two_batch_overlap": True}, "two-batch overlap"),
    ({"enable_pdmux": True}, "multiplexing"),
    ({"moe_a2a_backend": "deepep"}, "all-to-all"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED_SETTINGS)
def test_a_server_that_can_not_be_captured_right_is_refused_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    runner = FakeRunner(settings=settings)
    assert_refused(monkeypatch, tmp_path, runner, words, next(iter(settings)))


class TwoBackbones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = FakeBackbone(), FakeBackbone()

    def forward(self, batch: FakeBatch) -> Any:
        return self.model(batch)


def backbone_with(value: object) -> FakeBackbone:
    backbone = FakeBackbone()
    backbone.layers_to_capture = value
    return backbone


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        (FakeRunner(num_layers=4), "layer 4 is out of range: the model has 4"),
        (FakeRunner(model=nn.Identity()), "Identity: expected one module with `layers_to_capture`, found none"),
        (FakeRunner(model=TwoBackbones()), "found model, other"),
        (FakeRunner(model=FakeModel(backbone_with(None))), "model.layers_to_capture is NoneType, not a list"),
        (FakeRunner(dtype=torch.float16), "loaded as float16"),
    ],
)
def test_a_model_that_can_not_be_captured_right_is_refused_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: FakeRunner, words: str
) -> None:
    assert_refused(monkeypatch, tmp_path, runner, words)


def assert_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: FakeRunner, *words: str) -> None:
    batch = batch_of((A, 0, 4))
    hooks = hooked_in(monkeypatch, runner)
    status = status_in(tmp_path)
    assert status.state == "failed"
    assert all(word in status.message for word in words), status.message
    run_forward(hooks, runner, batch)
    assert list((tmp_path / "dumps").glob("*.pt")) == []


@pytest.mark.parametrize("text", ["", "3,x", "3;4"])
def test_settings_that_can_not_be_read_are_told_in_the_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setenv(LAYERS, text)
    hooks = install_hooks(monkeypatch)
    plugin.register()
    assert hooks.registered == []
    status = status_in(tmp_path)
    assert (status.state, status.layers) == ("failed", ())
    assert LAYERS in status.message


def test_a_fault_in_the_forward_pass_stops_capture_and_not_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backbone = FakeBackbone()
    runner = FakeRunner(model=FakeModel(backbone))
    hooks = hooked_in(monkeypatch, runner)
    backbone.layers_to_capture = [1]  # one state too few from now on
    assert isinstance(run_forward(hooks, runner, batch_of((A, 0, 4))), torch.Tensor)
    assert "gave 1 state for 2 layers" in status_in(tmp_path).message
    backbone.layers_to_capture = [1, 4]
    assert isinstance(run_forward(hooks, runner, batch_of((B, 0, 4))), torch.Tensor)
    assert dumps_in(tmp_path, 0) == {}
    assert status_in(tmp_path).state == "failed"


def test_a_model_that_gives_no_states_at_all_is_noticed_at_the_first_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backbone = FakeBackbone()
    runner = FakeRunner(model=FakeModel(backbone))
    hooks = hooked_in(monkeypatch, runner)
    backbone.layers_to_capture = []
    run_forward(hooks, runner, batch_of((A, 0, 4)))
    assert "ran without passing the capture point" in status_in(tmp_path).message


def test_a_disk_that_refuses_is_told_in_the_status_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(folder: Path, name: Any, **_: Any) -> Path:
        raise DumpWriteError(folder / name.filename, OSError(28, "No space left on device"))

    monkeypatch.setattr(plugin, "write_dump", refuse)
    runner = FakeRunner()
    hooks = hooked_in(monkeypatch, runner)
    for i in range(40):  # more than the ring has slots
        run_forward(hooks, runner, batch_of((f"eh-run-p{i}-0", 0, 4)))
    deadline = time.monotonic() + 60
    while status_in(tmp_path).state == "ready" and time.monotonic() < deadline:
        time.sleep(0.01)
    message = status_in(tmp_path).message
    assert "No space left on device" in message
    assert re.search(r"eh-run-p\d+-0\.000000-000004\.pt", message)  # whichever writer was the first
    assert "--dump-dir" in message


def test_a_second_model_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hooks = hooked_in(monkeypatch, FakeRunner())
    hooks.call("load_model", "after", None, FakeRunner())
    assert "second model" in status_in(tmp_path).message


_ALLOWED = """
import sys
for name in ("typer", "click", "rich", "datasets", "huggingface_hub", "transformers", "pyarrow", "numpy", "httpx",
             "jinja2", "xxhash", "yaml", "sglang"):
    sys.modules[name] = None
import eaglehs.extraction.plugin as plugin
assert plugin.register() is None
"""


def test_the_plugin_imports_with_everything_but_torch_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DUMP_DIR)
    subprocess.run([sys.executable, "-c", _ALLOWED], check=True, timeout=120)


_COST = """
import torch, sys
before = set(sys.modules)
import eaglehs.extraction.plugin
new = sorted(set(sys.modules) - before)
foreign = [name for name in new if name.split(".")[0] not in sys.stdlib_module_names | {"eaglehs"}]
assert not foreign, foreign
"""


def test_importing_the_plugin_brings_in_nothing_but_torch_and_the_standard_library() -> None:
    subprocess.run([sys.executable, "-c", _COST], check=True, timeout=120)
