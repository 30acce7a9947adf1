"""Standard output that takes nothing: each command ends in words and with 4, and a reader that has gone is no fault."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.eaglehs.cli import ENTRY, PLAIN

REFUSED = "error: the result can't be written to standard output. {} Send it to a place that takes it"


def ended(redirection: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run the command with its output redirected by a shell; return its exit code and stderr."""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *ENTRY, *arguments],
        env={**os.environ, **PLAIN, **environment},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("held", ["", "1"], ids=["held back", "at once"])
@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("extract", "--help")], ids=" ".join)
def test_a_full_disk_behind_standard_output_is_told_and_the_exit_code_is_4(arguments, held):
    """`extract --help` is longer than what Python holds back; `--help` and `--version` fail at the end alone."""
    exit_code, told = ended(">/dev/full", *arguments, PYTHONUNBUFFERED=held)
    assert told.startswith(REFUSED.format("No space left on device."))
    assert "Traceback" not in told
    assert "Exception ignored" not in told
    assert exit_code == 4


def test_a_standard_output_that_the_shell_closed_is_told():
    exit_code, told = ended(">&-", "--version")
    assert told.startswith(REFUSED.format("It is closed."))
    assert exit_code == 4


def test_a_reader_that_has_gone_is_no_fault():
    exit_code, told = ended("| true; exit ${PIPESTATUS[0]}", "--version", PYTHONUNBUFFERED="")
    assert told == ""
    assert exit_code == 0
