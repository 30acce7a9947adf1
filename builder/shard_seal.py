"""Makes a finished shard of its part file.

Read back and renamed; or, without the samples that failed, laid out anew; or, with a codec, recoded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..schemas.atomic import staged, sync_folder
from ..schemas.errors import StorageError
from ..schemas.index import IndexRow
from ..schemas.manifest import DatasetFolder
from .index_rows import index_row
from .pack_folder import clear_old
from .pack_state import Claim, PackState
from .plan import Plan, ShardPlan
from .read_back import ShardReadBackError, read_back
from .run_reader import Run
from .shard_coder import WrittenShard, code_shard
from .shard_packer import Draft, ShardResult, until_stopped
from .shard_parts import ShardParts, copy_samples, read_meta

if TYPE_CHECKING:
    from .pack import Job


class ShardSealer:
    """A ShardMaker (builder/pack.py) whose samples are in the shards' part files already."""

    def __init__(self, run: Run, plan: Plan, folder: DatasetFolder, parts: ShardParts) -> None:
        """`run.entries` is the ledger as it grows."""
        self._run = run
        self._folder = folder
        self._layout = plan.stored_layout
        self._parts = parts
        self._shards: Mapping[str, ShardPlan] = {shard.name: shard for shard in plan.shards}

    def make(self, shard: ShardPlan, fingerprint: str, stop: threading.Event) -> ShardResult:
        """Give the part the shard's name, or copy what `shard` has of it.

        Raises:
            StorageError: the disk is full or failed; the part is still there.
            ShardReadBackError: the part holds other bytes than were written.
        """
        whole, final, draft = self._shards[shard.name], self._folder.shard(shard.name), Draft()
        try:
            if not shard.samples:
                final.unlink(missing_ok=True)
            elif self._layout.is_coded:
                self._recode(whole, shard, draft, stop)
            elif len(shard.samples) == len(whole.samples):
                self._rename(whole, final, draft)
            else:
                self._rebuild(whole, shard, draft)
        except OSError as fault:
            raise StorageError(
                f"{final} can't be written: {fault.strerror or fault}",
                mend="Free space or repair the disk, and run the same command again: finished samples are kept",
            ) from None
        return draft.result(shard, fingerprint)

    def tidy(self, name: str) -> None:
        """Remove the part: all of it is in the finished shard."""
        self._parts.path(self._shards[name]).unlink(missing_ok=True)

    def prepare(self, claim: Claim, todo: Sequence[Job]) -> None:  # noqa: ARG002 - no shard is in the way
        """Remove manifest and index; no shard, since samples may be nowhere else."""
        clear_old(self._folder, PackState(self._folder, self._layout), claim, keep=self._shards)

    @property
    def parts(self) -> Collection[Path]:
        """All part files."""
        return [self._parts.path(shard) for shard in self._shards.values()]

    def _rename(self, shard: ShardPlan, final: Path, draft: Draft) -> None:
        with self._parts.opened(shard) as part:
            rows = self._rows(part, shard, shard, draft)
            sha256 = read_back(part, Path(part.name), rows, shard.size_bytes)
            os.fsync(part.fileno())
        Path(part.name).replace(final)
        sync_folder(final.parent)
        draft.file = WrittenShard(rows=rows, size_bytes=shard.size_bytes, sha256=sha256)

    def _rebuild(self, whole: ShardPlan, shard: ShardPlan, draft: Draft) -> None:
        final = self._folder.shard(shard.name)
        with self._parts.opened(whole) as part, staged(final) as out:
            rows = copy_samples(part, self._rows(part, whole, shard, draft), out, shard)
            sha256 = read_back(out, final, rows, shard.size_bytes)
        draft.file = WrittenShard(rows=rows, size_bytes=shard.size_bytes, sha256=sha256)

    def _recode(self, whole: ShardPlan, shard: ShardPlan, draft: Draft, stop: threading.Event) -> None:
        with self._parts.opened(whole) as part, staged(self._folder.shard(shard.name)) as out:
            rows = self._rows(part, whole, shard, draft)
            draft.file = code_shard(part, until_stopped(rows, stop), out, self._layout)

    def _rows(self, part: BinaryIO, whole: ShardPlan, shard: ShardPlan, draft: Draft) -> tuple[IndexRow, ...]:
        """Return where the samples of `shard` lie in the part, which is laid out as `whole`."""
        kept = {placed.key for placed in shard.samples}
        rows = []
        for placed in whole.samples:
            if placed.key not in kept:
                continue
            meta = read_meta(part, placed)
            if meta is None:
                raise _lost(placed.key)
            draft.add(meta, self._run.entries[meta.key].state_norms)
            rows.append(index_row(placed, meta, shard.name))
        return tuple(rows)


def _lost(key: str) -> ShardReadBackError:
    return ShardReadBackError(
        key,
        f"sample {key} is not in its shard any more",
        why="The part file was changed, or the disk is failing",
        mend="Run the same command again",
    )
