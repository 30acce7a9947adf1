"""The look at the dump folder, when the loop that looks stands still."""

import asyncio
from pathlib import Path

import pytest
from eaglehs.extraction import dump_watcher
from eaglehs.extraction.dump_watcher import DumpWatcher

RID = "eh-run1-a-0"


def test_dumps_that_came_since_the_pollers_last_look_count_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dump_watcher, "POLL_S", 3600)
    watcher = DumpWatcher(tmp_path, "eh-run1-")

    async def wait() -> tuple[bool, bool]:
        watcher.expect(RID, 6)
        before = await watcher.wait(RID, 0.001)
        (tmp_path / f"{RID}.000000-000006.pt").write_bytes(b"")
        return before, await watcher.wait(RID, 0.001)

    assert asyncio.run(wait()) == (False, True)
