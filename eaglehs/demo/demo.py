"""The whole path on a tiny model: the functions that the commands call, in the order in which a user would.

    imports -> make model -> extract -> pack, card -> verify -> load_dataset -> eaglehs.stream, the same bits -> report

A second start goes on with what is there; what another version made is made anew.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .. import __version__, console
from ..schemas.codec import read_record, write_record
from ..schemas.counts import counted
from ..schemas.errors import DataError, RecordError, UsageError
from ..schemas.states import default_layers
from .report import Array, DemoReport, Stage
from .tiny_model import NUM_LAYERS, write_tiny_model
from .tiny_tokenizer import CHAT_TEMPLATE, CONVERSATIONS, bundled

if TYPE_CHECKING:
    from ..schemas.progress import Progress

SHARD_SIZE_BYTES = 4_000_000
"""Gives a handful of shards, as a real run's 2 GB do."""

BATCH_SIZE = 4

Samples = dict[str, dict[str, Any]]
"""Key -> what `eaglehs.decode` gives."""

_MARK = "demo.json"


class DemoFaultError(DataError):
    """`verify` found faults in the dataset that the demo has just packed."""


class StreamMismatchError(DataError):
    """Two readers gave different bits for the same sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoMark:
    """`demo.json`: the folder is a demo's, and what it was made of."""

    KIND: ClassVar[str] = "eaglehs.demo"
    VERSION: ClassVar[int] = 1

    fingerprint: str


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The paths of a demo."""

    root: Path

    @property
    def model(self) -> Path:
        """The tiny model."""
        return self.root / "model"

    @property
    def prompts(self) -> Path:
        """The bundled conversations."""
        return self.root / "prompts.jsonl"

    @property
    def run(self) -> Path:
        """The run."""
        return self.root / "run"

    @property
    def dataset(self) -> Path:
        """The packed dataset."""
        return self.root / "dataset"


@dataclass(frozen=True, slots=True)
class _Done:
    """What a stage has done, but for its time."""

    num_samples: int = 0
    num_tokens: int = 0
    size_bytes: int = 0
    is_new: bool = True
    note: str = ""
    result: Any = None


def run_demo(root: Path) -> DemoReport:
    """Run every stage in the folder `root`, which is made if missing, and return what there is to show.

    Raises:
        UsageError: `root` holds something else than a demo.
        StreamMismatchError: two readers gave different bits.
        EaglehsError: a stage failed; see its own function.
    """
    folder = DemoFolder(root)
    claim_folder(folder)
    stages: list[Stage] = []

    def stage(name: str, work: Callable[[Progress], _Done]) -> Any:
        started = time.monotonic()
        with console.progress(name) as progress:
            done = work(progress)
        stages.append(
            Stage(
                name=name,
                seconds=round(time.monotonic() - started, 3),
                num_samples=done.num_samples,
                num_tokens=done.num_tokens,
                size_bytes=done.size_bytes,
                is_new=done.is_new,
                note=done.note,
            )
        )
        return done.result

    stage("imports", lambda _: _import_libraries())
    stage("model", lambda _: _make_model(folder))
    stage("extract", lambda progress: _extract(folder, progress))
    num_shards = stage("pack", lambda progress: _pack(folder, progress))
    stage("verify", lambda progress: _verify(folder, progress))
    stock = stage("load_dataset", lambda _: _read_stock(folder))
    ours = stage("eaglehs.stream", lambda _: _read_ours(folder, stock))
    return _report(folder, stages, ours, num_shards)


def claim_folder(folder: DemoFolder) -> None:
    """Make the folder a demo's, and clear what a demo of other inputs left there.

    Raises:
        UsageError: it holds something else.
    """
    wanted = DemoMark(fingerprint=_fingerprint())
    mark = folder.root / _MARK
    try:
        is_current = read_record(DemoMark, mark) == wanted
    except RecordError:
        if not mark.exists() and folder.root.exists() and (not folder.root.is_dir() or any(folder.root.iterdir())):
            raise UsageError(
                f"{folder.root} is there and was not made by `eaglehs demo`",
                mend="Give another folder: eaglehs demo DIR",
            ) from None
        is_current = False
    if not is_current:
        for stale in (folder.model, folder.run, folder.dataset):
            shutil.rmtree(stale, ignore_errors=True)
    folder.root.mkdir(parents=True, exist_ok=True)
    write_record(mark, wanted)


def check_same_bits(stock: Samples, ours: Samples) -> None:
    """Compare samples by key, array by array, as bits.

    Raises:
        StreamMismatchError: a sample is missing, or an array differs; both are named.
    """
    import torch

    if list(stock) != list(ours):
        raise StreamMismatchError(
            f"load_dataset gave {counted(len(stock), 'sample')}, eaglehs.stream {len(ours):,}, or other keys"
        )
    for key, sample in stock.items():
        for name, array in sample.items():
            if name != "key" and not torch.equal(array.view(torch.uint8), ours[key][name].view(torch.uint8)):
                raise StreamMismatchError(f"{key}: {name} of load_dataset and of eaglehs.stream have different bits")


def _import_libraries() -> _Done:
    """Import what the stages need, so that their times are of their own work."""
    import datasets  # noqa: F401 - for its side effect: it is in memory then
    import transformers  # noqa: F401 - likewise

    from ..builder import stream  # noqa: F401 - likewise
    from ..extraction.engines import transformers as engine  # noqa: F401 - likewise

    return _Done(note="torch, transformers, datasets")


def _make_model(folder: DemoFolder) -> _Done:
    write_tiny_model(folder.model)
    folder.prompts.write_bytes(bundled(CONVERSATIONS))
    size_bytes = sum(path.stat().st_size for path in folder.model.iterdir())
    return _Done(size_bytes=size_bytes, note=f"random, Kimi-K2's shape, {counted(NUM_LAYERS, 'layer')}")


def _extract(folder: DemoFolder, progress: Progress) -> _Done:
    from ..engine_start import EngineSettings
    from ..extract_run import ExtractSettings, extract

    summary = extract(
        ExtractSettings(
            model=str(folder.model),
            prompts=str(folder.prompts),
            out=folder.run,
            engine=EngineSettings(name="transformers"),
            command=("eaglehs", "demo", str(folder.root)),
        ),
        progress,
    )
    size_bytes = sum(path.stat().st_size for path in (folder.run / "dumps").rglob("*.pt"))
    return _Done(
        num_samples=summary.num_samples,
        num_tokens=summary.num_tokens,
        size_bytes=size_bytes,
        is_new=summary.num_new > 0,
        note=f"layers {', '.join(map(str, default_layers(NUM_LAYERS)))} and final",
    )


def _pack(folder: DemoFolder, progress: Progress) -> _Done:
    from ..builder.pack import PackSettings, pack_run
    from ..cards.write import write_card

    summary = pack_run(folder.run, folder.dataset, PackSettings(shard_size_bytes=SHARD_SIZE_BYTES), progress)
    write_card(folder.dataset)
    return _Done(
        num_samples=summary.totals.num_samples,
        num_tokens=summary.totals.num_tokens,
        size_bytes=summary.totals.size_bytes,
        is_new=not summary.is_unchanged,
        note=f"{counted(summary.num_shards, 'tar shard')}, index, card",
        result=summary.num_shards,
    )


def _verify(folder: DemoFolder, progress: Progress) -> _Done:
    from ..builder.verify import verify_dataset

    report = verify_dataset(folder.dataset, progress)
    if not report.is_good:
        raise DemoFaultError(
            f"{counted(len(report.faults), 'fault')} in {folder.dataset}; the first: {report.faults[0]}",
            mend=f"Remove {folder.root} and run `eaglehs demo` again",
        )
    return _Done(
        num_samples=report.num_samples,
        num_tokens=report.num_tokens,
        size_bytes=report.size_bytes,
        note="every byte and value, no fault",
    )


def _read_stock(folder: DemoFolder) -> _Done:
    """Read all samples with stock `datasets`; the result is key -> sample."""
    from datasets import load_dataset

    from ..builder.decode import decode

    rows = load_dataset(str(folder.dataset), split="train", streaming=True)
    return _reading({sample["key"]: sample for sample in map(decode, rows)}, "stock, streaming=True")


def _read_ours(folder: DemoFolder, stock: Samples) -> _Done:
    """Read all samples with `eaglehs.stream` and compare them; without that, nothing of the mapped files were read."""
    from ..builder.stream import stream

    samples = {sample["key"]: sample for sample in stream(folder.dataset)}
    check_same_bits(stock, samples)
    return _reading(samples, "compared: the same bits")


def _reading(samples: Samples, note: str) -> _Done:
    size_bytes = sum(array.nbytes for sample in samples.values() for name, array in sample.items() if name != "key")
    return _Done(
        num_samples=len(samples),
        num_tokens=sum(len(sample["input_ids"]) for sample in samples.values()),
        size_bytes=size_bytes,
        note=note,
        result=samples,
    )


def _report(folder: DemoFolder, stages: list[Stage], samples: Samples, num_shards: int) -> DemoReport:
    from ..builder.collate import collate

    key, sample = next(iter(samples.items()))
    return DemoReport(
        folder=str(folder.root),
        model=str(folder.model),
        prompts=str(folder.prompts),
        run=str(folder.run),
        dataset=str(folder.dataset),
        stages=tuple(stages),
        sample_key=key,
        sample=_arrays(sample),
        batch=_arrays(collate(list(samples.values())[:BATCH_SIZE])),
        num_shards=num_shards,
    )


def _arrays(tensors: dict[str, Any]) -> tuple[Array, ...]:
    return tuple(
        Array(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
        if name != "key"
    )


def _fingerprint() -> str:
    """Return a hash of what the states and the formats depend on."""
    parts = [__version__, *(version(package) for package in ("torch", "transformers", "tokenizers"))]
    content = b"\0".join([*(part.encode() for part in parts), bundled(CONVERSATIONS), bundled(CHAT_TEMPLATE)])
    return hashlib.blake2b(content, digest_size=16).hexdigest()
