"""How the tests are spread over two processes: real SGLang in the one, the other files by turns in the other.

pytest-xdist's own groups are no help: it writes a group into a test's id, which pytest 9.2 does not let it change.
On a busy machine an example of a property may take long: hypothesis is to judge what comes out, not how fast.
A shell's background job ignores Ctrl-C, and so do the commands that it starts; those of a test must hear it.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import pytest

SGLANG = "sglang"
"""In the name of each file that runs it; tests/test_house_rules.py holds that."""

with contextlib.suppress(ImportError):  # the GPU tests run in SGLang's environment, which has none
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file in one process, for its fixtures, and all of SGLang's in one: one server runs at a time."""
    from xdist.scheduler import LoadScopeScheduling

    class SglangApart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return SGLANG if SGLANG in file.rpartition("/")[2] else file

    config.option.loadscopereorder = False
    return SglangApart(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put SGLang's first: they are the longest chain."""
    items.sort(key=lambda item: SGLANG not in item.path.name)
