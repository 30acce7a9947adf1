"""The kill matrix under pytest: a seeded part of it by default, all of it with `make test-kills`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.sglang_cpu.rig import PYTHON_VARIABLE, sglang_python

from .cases import MODES, Case, as_table, draw
from .matrix import HEAD, Rig, Unbroken, make_unbroken, run_case
from .rigs import REFERENCE, TRANSFORMERS, fake_rig, kept_server, plain_rig, sglang_rig

SEED = 1
NUM_CASES = 60
NUM_OWN = 6


def of_both_modes(*, num_kept: int, num_own: int) -> list[Case]:
    return [case for mode in MODES for case in draw(SEED, mode, num_kept=num_kept, num_own=num_own)]


def name_of(case: Case) -> str:
    return f"{case.mode}, {case.victim}, {case.moment}"


needs_sglang = pytest.mark.skipif(sglang_python() is None, reason=f"{PYTHON_VARIABLE} is not set")


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


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    python = sglang_python()
    assert python is not None
    return sglang_rig(python, tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def kept(sglang: Rig) -> Iterator[tuple[Rig, Unbroken]]:
    with kept_server(sglang) as ready:
        yield ready


def run_all(rig: Rig, unbroken: Unbroken, cases: list[Case]) -> None:
    """Run the cases, print the report, and fail if any did."""
    rows = [HEAD, *(run_case(rig, case, unbroken) for case in cases)]
    print(f"\n{as_table(rows)}")  # noqa: T201 - the report is what the matrix is run for
    assert [row for row in rows[1:] if row[-1] != "ok"] == []


@needs_sglang
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_killed_clients_of_a_real_server_go_on(kept: tuple[Rig, Unbroken]) -> None:
    run_all(*kept, of_both_modes(num_kept=2, num_own=0))


@needs_sglang
@pytest.mark.sglang
@pytest.mark.kills
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES)
def test_the_whole_matrix_with_a_server_that_is_kept(mode: str, kept: tuple[Rig, Unbroken]) -> None:
    run_all(*kept, draw(SEED, mode, num_kept=NUM_CASES - NUM_OWN, num_own=0))


@needs_sglang
@pytest.mark.sglang
@pytest.mark.kills
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES)
def test_the_whole_matrix_with_servers_of_their_own(mode: str, sglang: Rig, kept: tuple[Rig, Unbroken]) -> None:
    cases = draw(SEED, mode, num_kept=NUM_CASES - NUM_OWN, num_own=NUM_OWN)
    run_all(sglang, kept[1], cases[NUM_CASES - NUM_OWN :])
