"""A dataset to its report: measured by the builder, drawn by the cards, with text by the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .builder.statistics import MeasureSettings, measure_dataset
from .cards.plots import check_can_plot
from .cards.report import ReportExtras, write_report
from .cards.write import kept_verification
from .schemas.codec import read_record
from .schemas.manifest import DatasetFolder, Manifest
from .schemas.progress import Progress
from .schemas.statistics import DatasetStatistics, PlotsFolder, SampleExcerpt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """What the user asked for."""

    out: Path | None = None
    """Folder of the report; None for `plots` in the dataset, where the card finds it."""

    max_samples: int | None = 256
    """Samples whose states are read; None for all."""

    tokenizer: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSummary:
    """What was written."""

    page: str
    files: tuple[str, ...]
    statistics: DatasetStatistics


def report_dataset(dataset: Path, settings: ReportSettings, progress: Progress) -> ReportSummary:
    """Measure the packed dataset in the folder `dataset` and write page, figures and PNGs.

    Raises:
        MissingPackageError: matplotlib is not installed.
        UsageError: no packed dataset is there, or the tokenizer can't be had as asked.
        DataError: manifest, index and shards do not belong together.
        StorageError: a shard or the tokenizer can't be read.
    """
    check_can_plot()
    tokenizer = None
    if settings.tokenizer is not None:
        from .extraction.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
    measured = measure_dataset(dataset, MeasureSettings(max_samples=settings.max_samples), progress)
    excerpts = tuple(_with_texts(excerpt, tokenizer) for excerpt in measured.excerpts)
    folder = DatasetFolder(dataset)
    plots = PlotsFolder(settings.out or folder.root / "plots")
    extras = ReportExtras(excerpts=excerpts, verified=kept_verification(folder))
    written = write_report(plots, read_record(Manifest, folder.manifest), measured.statistics, extras)
    return ReportSummary(page=str(plots.page), files=tuple(map(str, written)), statistics=measured.statistics)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return each token's own text; part of a character that several tokens make up reads as a replacement mark."""
    return tuple(tokenizer.decode([token], skip_special_tokens=False) for token in ids)


def _with_texts(excerpt: SampleExcerpt, tokenizer: Any) -> SampleExcerpt:
    return excerpt if tokenizer is None else replace(excerpt, texts=token_texts(tokenizer, excerpt.input_ids))
