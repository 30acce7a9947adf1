"""The kill matrix on real SGLang: four kills by default, all of it with `make test-kills`."""

from __future__ import annotations

import pytest

from tests.sglang_cpu.rig import PYTHON_VARIABLE, sglang_python

from .cases import MODES, SEED, Case, as_table, draw, of_both_modes
from .matrix import HEAD, Rig, Unbroken, run_case
from .rigs import kept_server, sglang_rig

NUM_CASES = 60
NUM_OWN = 6

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_python() is None, reason=f"{PYTHON_VARIABLE} is not set"),
]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    python = sglang_python()
    assert python is not None
    return sglang_rig(python, tmp_path_factory.mktemp("sglang"))


def rows_of(rig: Rig, unbroken: Unbroken, cases: list[Case]) -> list[tuple[object, ...]]:
    return [run_case(rig, case, unbroken) for case in cases]


def report(rows: list[tuple[object, ...]]) -> None:
    """Print the report, and fail if a case did."""
    print(f"\n{as_table([HEAD, *rows])}")  # noqa: T201 - the report is what the matrix is run for
    assert [row for row in rows if row[-1] != "ok"] == []


@pytest.mark.timeout(900)
def test_killed_clients_of_a_real_server_go_on(sglang: Rig) -> None:
    with kept_server(sglang) as (rig, unbroken):
        report(rows_of(rig, unbroken, of_both_modes(num_kept=2, num_own=0)))


@pytest.mark.kills
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES)
def test_the_whole_matrix(mode: str, sglang: Rig) -> None:
    cases = draw(SEED, mode, num_kept=NUM_CASES - NUM_OWN, num_own=NUM_OWN)
    with kept_server(sglang) as (rig, unbroken):
        rows = rows_of(rig, unbroken, [case for case in cases if not case.has_own_server])
    report([*rows, *rows_of(sglang, unbroken, [case for case in cases if case.has_own_server])])
