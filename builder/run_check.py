"""Checks a finished sample of a run against everything that is known of it: prompt, ledger, run."""

from __future__ import annotations

from ..schemas.counts import counted
from ..schemas.ledger import LedgerEntry
from ..schemas.prompt import Prompt
from .assemble import ExaminedSample, ForeignDumpError, RowCoverageError, SampleError, examine
from .run_reader import Run


class DumpChangedError(SampleError):
    """A dump is not the file that the ledger lists."""


def examine_finished(run: Run, prompt: Prompt) -> ExaminedSample:
    """Return the finished sample of `prompt`, after checking its dumps and that they are those of the ledger.

    Raises:
        DumpError, SampleError: a dump is missing, damaged, changed, or not this prompt's; see builder/assemble.py.
    """
    examined = examine(prompt, run.dump_paths(prompt.key), run.layout)
    _check_ledger(run.entries[prompt.key], examined, run.record.run_id)
    return examined


def _check_ledger(entry: LedgerEntry, examined: ExaminedSample, run_id: str) -> None:
    for dump in examined.dumps:
        if dump.request.run != run_id:
            raise ForeignDumpError(entry.key, f"{dump.path} is of run {dump.request.run}, this is run {run_id}")
    if entry.num_tokens != examined.checked.num_tokens:
        raise RowCoverageError(
            entry.key,
            f"the ledger says {counted(entry.num_tokens, 'token')}, the prompt has {examined.checked.num_tokens:,}",
        )
    listed = {dump.name: dump for dump in entry.dumps}
    for found, dump in zip(examined.checked.dumps, examined.dumps, strict=True):
        wanted = listed[found.name]
        if found != wanted:
            raise DumpChangedError(
                entry.key,
                f"{dump.path} has {counted(found.size_bytes, 'byte')} and hash {found.xxh3_128}, "
                f"the ledger lists {counted(wanted.size_bytes, 'byte')} and {wanted.xxh3_128}",
                why="The file was changed or damaged after it was checked",
                mend="Remove it and run `eaglehs extract` again: the sample is computed anew",
            )
