"""The environment that the plugin is told by."""

from __future__ import annotations

from pathlib import Path

import pytest
from eaglehs.extraction.capture_settings import CaptureSettings
from eaglehs.schemas.errors import UsageError

FOLDER = {"SGLANG_HS_DUMP_DIR": "/dev/shm/dumps"}


@pytest.mark.parametrize("environment", [{}, {"SGLANG_HS_DUMP_DIR": ""}, {"SGLANG_HS_LAYERS": "1"}])
def test_without_a_folder_there_are_no_settings(environment: dict[str, str]) -> None:
    assert CaptureSettings.from_environment(environment) is None


def test_folder_and_layers_are_enough() -> None:
    found = CaptureSettings.from_environment({**FOLDER, "SGLANG_HS_LAYERS": "59, 3,31"})
    assert found == CaptureSettings(
        dump_dir=Path("/dev/shm/dumps"), layers=(3, 31, 59), rid_prefix="eh-", writers=6, slots=6
    )


def test_settings_come_back_from_the_environment_that_they_make() -> None:
    given = CaptureSettings(dump_dir=Path("/a b/ü"), layers=(0, 7), rid_prefix="eh-run1-", writers=2, slots=9)
    assert CaptureSettings.from_environment(given.to_environment()) == given


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LAYERS", ""),
        ("LAYERS", "3;31"),
        ("LAYERS", "3,,31"),
        ("LAYERS", "three"),
        ("RID_PREFIX", ""),
        ("RID_PREFIX", "run-"),
        ("WRITERS", "0"),
        ("WRITERS", "-1"),
        ("SLOTS", "many"),
        ("SLOTS", "1.5"),
    ],
)
def test_a_value_that_can_not_be_meant_is_refused_by_name_and_value(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        CaptureSettings.from_environment({**FOLDER, "SGLANG_HS_LAYERS": "1", f"SGLANG_HS_{name}": text})
    assert f"SGLANG_HS_{name} is {text!r}" in str(caught.value)
