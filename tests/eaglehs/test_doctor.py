"""`eaglehs doctor`: what it tells as text and JSON, and that each thing that would stop a run is named with exit 1."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from eaglehs.extraction.engines import choose

from eaglehs import doctor
from eaglehs.doctor import Where, diagnose
from eaglehs.engine_start import EngineSettings, pick_engine
from tests.eaglehs.cli import eaglehs


@pytest.fixture
def bare_machine(monkeypatch):
    """No GPU, whatever machine the test runs on."""
    monkeypatch.setattr(doctor, "_gpus", lambda: iter(()))
    monkeypatch.setattr(choose, "has_gpu", lambda: False)


def python_with_sglang(folder: Path, version: str) -> str:
    """Return a Python that says it has this SGLang."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho {version}\n")
    script.chmod(0o755)
    return str(script)


def test_text_and_json_tell_versions_room_and_engine(tmp_path):
    done = eaglehs("doctor", "--json", cwd=tmp_path, EAGLEHS_SGLANG_PYTHON="")
    found = json.loads(done.stdout)
    assert found["packages"]["torch"]
    assert {folder["use"] for folder in found["folders"]} >= {"run", "spool"}
    assert all(folder["free_bytes"] > 0 for folder in found["folders"])
    assert done.returncode == (1 if found["faults"] else 0)
    text = eaglehs("doctor", "--dump-dir", tmp_path / "spool", cwd=tmp_path, EAGLEHS_SGLANG_PYTHON="").stdout
    for word in ("eaglehs", "packages", "gpu", "sglang", "engine", f"spool      {tmp_path / 'spool'}", "files"):
        assert word in text
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_gpu_and_sglang_can_still_run_small_models(bare_machine, tmp_path):
    found = diagnose(Where(out=tmp_path / "run", dump_dir=tmp_path))
    assert (found.faults, found.engine) == ((), "transformers")
    assert "fit for small models" in found.warnings[0]


@pytest.mark.usefixtures("bare_machine")
@pytest.mark.parametrize(
    ("version", "fault"),
    [("0.5.23", ""), ("0.4.1", "has SGLang 0.4.1, expected 0.5.11 to "), ("9.9.9", "SGLang 9.9.9")],
)
def test_the_sglang_that_is_named_must_be_a_supported_one(version, fault, tmp_path):
    found = diagnose(Where(out=tmp_path, dump_dir=tmp_path, sglang_python=python_with_sglang(tmp_path, version)))
    assert found.sglang.version == version
    assert found.sglang.is_supported == (not fault)
    assert fault in " ".join(found.faults)
    assert bool(found.faults) == bool(fault)


def test_doctor_and_extract_take_the_same_engine(monkeypatch, tmp_path):
    python = python_with_sglang(tmp_path, "0.5.23")
    for has_gpu, engine in ((True, "sglang"), (False, "transformers")):
        monkeypatch.setattr(choose, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        found = diagnose(Where(out=tmp_path, dump_dir=tmp_path, sglang_python=python))
        assert (found.engine, found.engine_reason) == pick_engine(EngineSettings(sglang_python=python))
        assert found.engine == engine


def test_a_named_python_without_sglang_stops_a_run(tmp_path):
    done = eaglehs("doctor", "--sglang-python", tmp_path / "none", "--json", cwd=tmp_path)
    assert done.returncode == 1
    (fault,) = json.loads(done.stdout)["faults"]
    assert f"{tmp_path / 'none'} can't be run" in fault


def test_few_file_descriptors_and_missing_packages_stop_a_run(bare_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(doctor, "NEEDED", (*doctor.NEEDED, "no-such-package"))
    faults = diagnose(Where(out=tmp_path, dump_dir=tmp_path)).faults
    assert "no-such-package is missing" in faults[0]
    assert "may open 256 files" in faults[1]


@pytest.fixture
def read_only(tmp_path):
    folder = tmp_path / "ro"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1M", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_cannot_be_written_stops_a_run(bare_machine, read_only):
    faults = diagnose(Where(out=read_only / "run", dump_dir=read_only)).faults
    assert faults[0] == f"the run {read_only / 'run'} can't be written by this user"
    assert "the spool" in faults[1]


def test_little_room_is_a_warning(bare_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "SMALL_BYTES", 10**18)
    found = diagnose(Where(out=tmp_path, dump_dir=tmp_path))
    assert any("--shm-size" in warning for warning in found.warnings)
    assert found.faults == ()


def test_looking_imports_nothing_heavy():
    code = (
        "import sys; from eaglehs.doctor import Where, diagnose; diagnose(Where());"
        "print({'torch', 'transformers', 'datasets', 'sglang'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
