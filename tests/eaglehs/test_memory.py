"""Arrow allocates from the system in an extraction: it must hear of it before it is imported."""

import os
import subprocess
import sys

SCRIPT = """
import sys
from eaglehs.commands.extract import extract
from eaglehs.extract_run import allocate_plainly
assert "pyarrow" not in sys.modules
allocate_plainly()
import pyarrow
print(pyarrow.default_memory_pool().backend_name)
"""


def backend(**environment: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_arrow_keeps_no_pool_of_its_own_while_extracting():
    assert backend() == "system"


def test_a_pool_that_the_user_has_chosen_stays():
    assert backend(ARROW_DEFAULT_MEMORY_POOL="mimalloc") == "mimalloc"
