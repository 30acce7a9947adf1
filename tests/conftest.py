"""How the tests are spread over two processes (pytest-xdist): real SGLang in the one, files by turns in the other."""

from __future__ import annotations

import pytest

SGLANG = "sglang"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file in one process, for its fixtures, and all of SGLang's in one: one server runs at a time.

    SGLang's come first: they are the longest chain.
    """
    for item in items:
        group = SGLANG if item.get_closest_marker(SGLANG) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker(SGLANG) is None)
