"""Run the matrix and print its report: `python -m tests.kills --seed 1 --kept 54 --own 6 --mode one-step`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.sglang_cpu.rig import sglang_python

from .cases import MODES, Case, as_table, draw
from .matrix import HEAD, Rig, Unbroken, run_case
from .rigs import kept_server, sglang_rig


def run_all(rig: Rig, unbroken: Unbroken, cases: Sequence[Case], rows: list[tuple[object, ...]]) -> None:
    """Add a row for each case, and show it at once."""
    for case in cases:
        rows.append(run_case(rig, case, unbroken))
        sys.stderr.write(f"{rows[-1]}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kept", type=int, default=54, help="kills of clients of one server")
    parser.add_argument("--own", type=int, default=6, help="kills of extractions with a server of their own")
    parser.add_argument("--mode", choices=MODES, action="append")
    arguments = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: its commands must hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    python = sglang_python()
    if python is None:
        raise SystemExit("EAGLEHS_SGLANG_PYTHON is not set: no SGLang to run")
    rows: list[tuple[object, ...]] = [HEAD]
    modes = arguments.mode or MODES
    drawn = [draw(arguments.seed, mode, num_kept=arguments.kept, num_own=arguments.own) for mode in modes]
    cases = [case for of_modes in zip(*drawn, strict=True) for case in of_modes]  # the modes in turn
    with tempfile.TemporaryDirectory(prefix="eaglehs-kills-", dir=os.environ.get("TMPDIR")) as folder:
        rig = sglang_rig(python, Path(folder))
        with kept_server(rig) as (rig, unbroken):
            run_all(rig, unbroken, [case for case in cases if not case.has_own_server], rows)
        run_all(rig, unbroken, [case for case in cases if case.has_own_server], rows)
    num_ok = sum(row[-1] == "ok" for row in rows)
    sys.stdout.write(f"{as_table(rows)}\n{num_ok} of {len(rows) - 1} kills passed\n")
    return 0 if num_ok == len(rows) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
