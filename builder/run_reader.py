"""Opens a run as `extract` left it: what was to be done, what is done, what failed; read only.

open_run(path) -> Run
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..schemas.codec import read_record
from ..schemas.counts import counted
from ..schemas.errors import RecordError, UsageError
from ..schemas.folders import no_folder
from ..schemas.ledger import LedgerEntry, SampleStatus, read_entries
from ..schemas.manifest import MANIFEST_FILENAME
from ..schemas.published import HIDDEN, holds_path
from ..schemas.run import RunFolder, RunRecord
from .plan import DatasetLayout
from .prompt_table import PromptTable

_AROUND = "()[]{}\"',;:"
"""What may stand around a word and is no part of it."""


class NoRunError(UsageError):
    """There is no run where one was expected."""


class UnfinishedRunError(UsageError):
    """Prompts of the run have neither states nor a recorded failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run on disk. Close it, or use it in a `with`."""

    folder: RunFolder
    record: RunRecord
    prompts: PromptTable
    entries: Mapping[str, LedgerEntry]
    """Key -> its last ledger line."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.prompts.close()

    @property
    def layout(self) -> DatasetLayout:
        """Layers and width of the run's states."""
        return DatasetLayout(layers=self.record.layers, hidden_size=self.record.model.hidden_size)

    @property
    def failed(self) -> dict[str, str]:
        """Key -> reason of the samples that failed in the run."""
        return {key: entry.reason for key, entry in self.entries.items() if entry.status is SampleStatus.FAILED}

    @property
    def unfinished(self) -> list[str]:
        """Keys of the prompts without a ledger line, in order."""
        return [key for key in self.prompts.keys if key not in self.entries]

    @property
    def num_done(self) -> int:
        """Finished samples."""
        return sum(entry.status is SampleStatus.DONE for entry in self.entries.values())

    def dump_paths(self, key: str) -> list[Path]:
        """Where the ledger says that a finished sample's dumps lie, in row order."""
        return [self.folder.dump_path(key, dump.name) for dump in self.entries[key].dumps]

    def check_finished(self) -> None:
        """Refuse to go on with prompts that are not done.

        Raises:
            UnfinishedRunError: with both counts.
        """
        unfinished = self.unfinished
        if unfinished:
            raise UnfinishedRunError(
                f"the run {self.folder.root} is not finished: {len(self.entries):,} of "
                f"{counted(len(self.prompts), 'sample is', 'samples are')} done, {unfinished[0]} is the first "
                "that is not",
                mend="Finish it with the same `eaglehs extract` command, or pack what is there with --partial",
            )


def read_run_record(path: Path) -> RunRecord:
    """Return run.json of the run at `path`.

    Raises:
        NoRunError: no folder, no run in it, or a dataset.
        RecordError: run.json can't be read.
    """
    folder = RunFolder(path)
    if folder.record.exists():
        return read_record(RunRecord, folder.record)
    if (path / MANIFEST_FILENAME).exists():
        raise NoRunError(f"{path} is a packed dataset, not a run", mend="Give the folder that `eaglehs extract` wrote")
    what = f"{path} holds no run: {folder.record.name} is missing" if path.is_dir() else no_folder(path)
    raise NoRunError(what, mend="Make a run with `eaglehs extract --model M --prompts P --out run`, or give its folder")


def open_run(path: Path, *, spill: Path | None = None) -> Run:
    """Open the run at `path`; `spill` is a folder for an unlinked file of 5 bytes a token.

    Raises:
        NoRunError: there is no run.
        RecordError: run.json, prompts.parquet or the ledger can't be read, or do not belong together.
    """
    record = read_run_record(path)
    folder = RunFolder(path)
    prompts = PromptTable(folder.prompts, vocab_size=record.model.vocab_size, spill=spill)
    try:
        _check_counts(record, prompts)
        entries = read_entries(folder.ledger)
        _check_ledger(folder.ledger, entries, prompts)
    except BaseException:
        prompts.close()
        raise
    return Run(folder=folder, record=record, prompts=prompts, entries=entries)


def reason_class(reason: str) -> str:
    """Return what failures of one kind have in common: the first sentence, without names and numbers."""
    name, _, said = reason.partition(": ")
    sentence = reason if "(" in name or not said else said
    sentence = sentence.split(". ")[0].rstrip(".")
    return " ".join(map(_without_name, sentence.split()))[:80] or "no reason given"


def _without_name(word: str) -> str:
    """Return a path as `…`, a word with a digit in it as `N`, in the brackets, quotes and commas that it stands in."""
    core = word.strip(_AROUND)
    if holds_path(core):
        return word.replace(core, HIDDEN)
    return word.replace(core, "N") if any(char.isdigit() for char in core) else word


def failures_by_class(reasons: dict[str, str]) -> dict[str, int]:
    """Return class of reason -> samples, most frequent first."""
    return dict(Counter(reason_class(reason) for reason in reasons.values()).most_common())


def _check_ledger(path: Path, entries: Iterable[str], prompts: PromptTable) -> None:
    for key in entries:
        if key not in prompts:
            raise RecordError(f"names sample {key}, which is not in {prompts.path.name}", where=str(path))


def _check_counts(record: RunRecord, prompts: PromptTable) -> None:
    facts = record.prompts
    for what, found, wanted in (
        ("prompt", len(prompts), facts.num_prompts),
        ("token", prompts.num_tokens, facts.num_tokens),
        ("trainable token", prompts.num_trainable, facts.num_trainable),
    ):
        if found != wanted:
            raise RecordError(
                f"holds {counted(found, what)}, but run.json says {wanted:,}",
                where=str(prompts.path),
                why="The two files are of different runs, or one was edited",
            )
