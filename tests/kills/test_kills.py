"""A seeded part of the kill matrix on engines that start at once: transformers, and a fake of SGLang's server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .cases import Case, as_table, of_both_modes
from .matrix import HEAD, Rig, Unbroken, make_unbroken, run_case
from .rigs import REFERENCE, TRANSFORMERS, fake_rig, plain_rig


def name_of(case: Case) -> str:
    return f"{case.mode}, {case.victim}, {case.moment}"


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, Unbroken]:
    """The embedded engine, which repeats bit for bit, and the dataset that it makes when nobody disturbs it."""
    rig = plain_rig(tmp_path_factory.mktemp("transformers"), TRANSFORMERS)
    rig = Rig(model=rig.model, prompts=rig.prompts, folder=rig.folder, engine=rig.engine, attached=TRANSFORMERS)
    return rig, make_unbroken(rig, REFERENCE, rig.folder / "unbroken")


@pytest.mark.parametrize("case", of_both_modes(num_kept=5, num_own=0), ids=name_of)
def test_a_killed_extraction_on_transformers_goes_on_to_the_unbroken_bytes(
    case: Case, transformers: tuple[Rig, Unbroken]
) -> None:
    rig, unbroken = transformers
    row = run_case(rig, case, unbroken)
    assert row[-1] == "ok", as_table([HEAD, row])


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, Unbroken]:
    """A fake server for each extraction; it shows what becomes of processes, ports and dump folders."""
    rig = fake_rig(tmp_path_factory.mktemp("fake"))
    return rig, make_unbroken(rig, replace(REFERENCE, has_own_server=True), rig.folder / "unbroken")


@pytest.mark.parametrize("case", of_both_modes(num_kept=0, num_own=6), ids=name_of)
def test_an_extraction_whose_server_is_killed_goes_on_with_another(case: Case, fake: tuple[Rig, Unbroken]) -> None:
    rig, unbroken = fake
    row = run_case(rig, case, unbroken)
    assert row[-1] == "ok", as_table([HEAD, row])
