"""The folder that brings the plugin into another Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from eaglehs.extraction import plugin_site
from eaglehs.extraction.plugin_site import make_plugin_site
from eaglehs.extraction.server_environment import find_plugin_site

_LOAD = """
from importlib.metadata import entry_points, version
[point] = entry_points(group="sglang.srt.plugins")
assert point.load().__module__ == "eaglehs.extraction.plugin"
import eaglehs.schemas.dump
print(eaglehs.__file__, version("eaglehs"))
"""


def test_another_python_finds_the_plugin_there_and_nothing_of_the_command(tmp_path: Path) -> None:
    site = make_plugin_site(tmp_path / "site")
    # No installed packages but torch: as in an environment that has SGLang and no eaglehs.
    import torch

    only_torch = tmp_path / "lib"
    only_torch.mkdir()
    for package in Path(torch.__file__).parents[1].iterdir():
        if "eaglehs" not in package.name:
            (only_torch / package.name).symlink_to(package)
    path = f"{site}:{only_torch}"
    found = subprocess.run(
        [sys.executable, "-S", "-P", "-c", _LOAD],
        env={"PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.startswith(str(site / "eaglehs" / "__init__.py"))
    assert sorted(path.name for path in (site / "eaglehs").iterdir() if path.name != "__pycache__") == [
        "__init__.py",
        "extraction",
        "schemas",
    ]


def test_making_it_again_changes_nothing_and_mends_what_was_broken(tmp_path: Path) -> None:
    site = make_plugin_site(tmp_path)
    (site / "eaglehs" / "schemas").unlink()
    (site / "eaglehs" / "extraction").unlink()
    (site / "eaglehs" / "extraction").symlink_to("/nowhere")
    make_plugin_site(tmp_path)
    assert (site / "eaglehs" / "extraction" / "plugin.py").is_file()
    assert (site / "eaglehs" / "schemas" / "dump.py").is_file()
    assert not list(site.rglob("*.part"))


@pytest.mark.parametrize("name", ["METADATA", "entry_points.txt"])
def test_the_metadata_is_what_importlib_needs(tmp_path: Path, name: str) -> None:
    [metadata] = make_plugin_site(tmp_path).glob("eaglehs-*.dist-info")
    assert "eaglehs" in (metadata / name).read_text()


def test_another_installation_leaves_the_links_of_a_server_that_still_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLEHS_CACHE", str(tmp_path / "cache"))
    ours = find_plugin_site("/another/python")
    assert ours is not None
    other = tmp_path / "other" / "schemas"
    other.mkdir(parents=True)
    monkeypatch.setattr(plugin_site, "_schemas_file", str(other / "__init__.py"))
    theirs = find_plugin_site("/another/python")
    assert theirs is not None
    assert (theirs / "eaglehs" / "schemas").resolve() == other
    assert (ours / "eaglehs" / "schemas").resolve() != other
