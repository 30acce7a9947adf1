"""A `datasets` builder class that streams bfloat16 tensors straight from memory-mapped shards.

    HiddenStates(data_files={"train": ["dataset/data/train-*.tar"]}).as_streaming_dataset(split="train")

It gives a `datasets.IterableDataset` whose rows are what `eaglehs.decode` returns, with all that one can do (`map`,
`split_dataset_by_node`, `state_dict`, ...). It is not needed to load a dataset: stock `load_dataset` reads the same
files. Unlike `eaglehs.stream` it needs no manifest and no index, takes any list of shards, and shuffles shards alone.

`datasets` replaces `open`, `os.path` and `Path` in this module by ones that read URLs; local shards are read by other
modules, with the real ones.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import datasets
import torch

from ..schemas.errors import DataError, UsageError
from ..schemas.states import PLANES_SUFFIX, Codec, is_state_name, layers_of
from .decode import DecodedSample, column_of, decode
from .file_map import ShardCutError
from .sample_reads import choose_arrays
from .shard_samples import local_layout, local_samples
from .tar_header import BLOCK


@dataclass
class HiddenStatesConfig(datasets.BuilderConfig):  # type: ignore[misc]  # `datasets` has no types
    """Options of `HiddenStates`, given to its constructor."""

    states: Sequence[str] | None = None
    """Which states to read, such as ["layer_3", "final"]; None for all. Ids and mask always come."""

    max_tokens: int | None = None
    """Longer samples lose their tail, in all arrays alike."""


class ShardMixError(DataError):
    """Shards of different datasets stand in one list."""


class HiddenStates(datasets.GeneratorBasedBuilder):  # type: ignore[misc]  # `datasets` has no types
    """Rows `{"key", "input_ids", "loss_mask", "layer_<k>" ..., "final"}`, states bfloat16 [T, H]; for streaming only.

    From local shards only the bytes that are asked for are read, when they are used. Shards behind `hf://` and other
    URLs are read whole, member by member.
    """

    BUILDER_CONFIG_CLASS = HiddenStatesConfig

    def _info(self) -> datasets.DatasetInfo:
        # Without features rows pass through untouched; there are none for bfloat16.
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        if not self.config.data_files:
            raise UsageError("HiddenStates needs data_files", mend='Give data_files={"train": ["data/train-*.tar"]}')
        if self.config.max_tokens is not None and self.config.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.config.max_tokens}", mend="Give 1 or more")
        splits = []
        for name, shards in dl_manager.download(self.config.data_files).items():
            if not _is_remote(shards[0]):  # before there are workers, of which each sees some of the shards
                self._check_alike(next(self._local(shards[0])), shards[0])
            splits.append(datasets.SplitGenerator(name=name, gen_kwargs={"shards": list(shards)}))
        return splits

    def _generate_shards(self, shards: list[str]) -> Iterator[str]:
        yield from shards

    def _generate_examples(self, shards: list[str]) -> Iterator[tuple[str, DecodedSample]]:
        for shard in shards:
            for sample in self._remote(shard) if _is_remote(shard) else self._local(shard):
                self._check_alike(sample, shard)
                yield f"{shard}:{sample['key']}", sample

    def _check_alike(self, sample: DecodedSample, shard: str) -> None:
        """Hold a sample against the first one that this process, or the one that it was forked from, has seen."""
        shape = _shape(sample)
        first_shard, first_shape = self.__dict__.setdefault("_first", (shard, shape))
        if shape != first_shape:
            raise ShardMixError(
                f"{shard} has {shape}, {first_shard} has {first_shape}",
                why="The shards are of different datasets: of other layers or another width",
                mend="Give the shards of one dataset",
            )

    def _local(self, shard: str) -> Iterator[DecodedSample]:
        layout = local_layout(shard)
        arrays = choose_arrays(self.config.states, layout.layers)
        return local_samples(shard, layout, arrays, max_tokens=self.config.max_tokens)

    def _remote(self, shard: str) -> Iterator[DecodedSample]:
        states = self.config.states
        wanted = None
        if states is not None:
            arrays = choose_arrays(states, layers_of(states))
            wanted = {column_of(name, codec) for name in arrays for codec in Codec}
        T = self.config.max_tokens
        try:
            for row in _rows(_members(shard), wanted):
                sample = decode(row)
                yield {name: value[:T] if isinstance(value, torch.Tensor) else value for name, value in sample.items()}
        except tarfile.ReadError as fault:
            why = "It was cut, or is no tar"
            raise ShardCutError(f"{shard}: {fault}", why=why, mend="Copy the shard again") from None

    def download_and_prepare(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: Arrow has no bfloat16, and a copy of the whole set in a cache is not wanted.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "HiddenStates streams and prepares no copy",
            mend="Call as_streaming_dataset(split='train'), or use load_dataset, which needs no code of ours",
        )


def _members(shard: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of each member of a remote shard, which is read as a stream.

    Raises:
        ShardCutError: it ends between two members, which tar readers take for the end.
        tarfile.ReadError: it ends within one.
    """
    with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:  # noqa: PTH123 - see above
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                yield member.name, content
            archive.members = []  # type: ignore[attr-defined]  # typeshed lacks it; or it would keep them all
        if not (archive.fileobj and archive.fileobj.read(BLOCK)):  # one block of zeros was read, another must be
            raise ShardCutError(f"{shard}: it ends without the zeros that end a tar", mend="Copy the shard again")


def _rows(archive: Iterable[tuple[str, Any]], wanted: set[str] | None) -> Iterator[dict[str, Any]]:
    """Yield the raw members of each sample of a tar stream, as `decode` takes them."""
    row: dict[str, Any] = {}
    for name, member in archive:
        key, _, column = name.rpartition("/")[2].partition(".")
        if row and row["__key__"] != key:
            yield row
            row = {}
        row["__key__"] = key
        if column.endswith((".npy", PLANES_SUFFIX)) and (wanted is None or column in wanted):
            row[column] = member.read()
    if row:
        yield row


def _shape(sample: DecodedSample) -> str:
    states = (f"{name} of width {value.shape[-1]}" for name, value in sample.items() if is_state_name(name))
    return ", ".join(states) or "no states"


def _is_remote(shard: str) -> bool:
    return "://" in shard
