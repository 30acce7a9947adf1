"""Plan: which samples go to which shard, and every member's place and size there, known before the first state is.

One pure function under `extract`, `pack`, resume, progress and the index. Token counts fix all sizes (`meta.json` is
padded to a size of its own), so finished samples may be written in any order, by any worker, straight to their place.
A sample that fails for good is taken out by laying out its one shard without it (`ShardPlan.without`); the others stay.

A shard: samples one after another; a sample: `meta.json` and the arrays of schemas/states.py in their order; a
member: a tar header of 512 bytes, the `.npy` header (builder/npy.py), the array, zeros up to 512; at the end two
blocks of zeros and zeros up to a multiple of 10,240. The shard size bounds that whole file.

A codec changes no plan: shards are planned and filled plain, and recoded when they are whole (builder/shard_coder.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..schemas.counts import counted
from ..schemas.errors import DataError, UsageError
from ..schemas.manifest import shard_name
from ..schemas.sample import META_MEMBER, NO_NEXT_TOKEN, SampleMeta, meta_bytes
from ..schemas.sharding import Sharding
from ..schemas.sizes import format_size
from ..schemas.states import MAX_MEMBER_BYTES, ArraySpec, Codec, array_specs
from .npy import MIN_PADDED_ARRAY_BYTES, PLAIN_HEADER_BYTES, padded_header_bytes
from .tar_header import BLOCK, file_bytes, pad_to

REFUSED_SHARD_BYTES = 50 * 1000**3
"""The Hub refuses files over 50 GB, and uploads of files near it fail at random (huggingface_hub issue 1933)."""

_MOST_TRIES = 20
"""Numbers of shards that are tried for even shares before full shards are halved."""

META = "meta"
"""The name of `meta.json` among a sample's members, where the arrays have their own names."""


class DuplicateKeyError(DataError):
    """Two samples have one key: readers would merge them, or train on one twice."""


class SampleTooLongError(DataError):
    """An array of a sample would pass 2 GiB, which Arrow and so `datasets` can't hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """What must be known of a sample to lay it out."""

    key: str
    id: str
    source: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetLayout:
    """What is the same for all samples of a dataset."""

    layers: tuple[int, ...]
    hidden_size: int
    codec: Codec = Codec.PLAIN

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """The arrays of a sample, in member order."""
        return _specs(self.layers, self.hidden_size, self.codec)

    @property
    def is_coded(self) -> bool:
        """Whether the states are not stored as they are."""
        return self.codec is not Codec.PLAIN

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sample: each member stays under 2 GiB."""
        return (MAX_MEMBER_BYTES - BLOCK * 20) // max(spec.row_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """One member of a shard: where its parts lie in the file."""

    name: str
    """Full name: `<key>.layer_3.bf16.npy`."""

    array: str
    """`meta`, `input_ids`, `loss_mask`, `layer_<k>` or `final`."""

    header_offset: int
    """Of the tar header; a multiple of 512."""

    npy_bytes: int
    """Length of the `.npy` header; 0 for `meta.json`."""

    data_bytes: int
    """Length of the array, or of the whole `meta.json`."""

    @property
    def data_offset(self) -> int:
        """Where the array begins; a multiple of 64."""
        return self.header_offset + BLOCK + self.npy_bytes

    @property
    def size(self) -> int:
        """The member's size as the tar header gives it."""
        return self.npy_bytes + self.data_bytes

    @property
    def end(self) -> int:
        """Where the next member's tar header begins."""
        return self.header_offset + BLOCK + pad_to(self.size, BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSample:
    """A sample at its place in a shard."""

    sample: PlannedSample
    layout: DatasetLayout
    start: int
    """Offset of its first tar header."""

    end: int
    """Where the next sample begins."""

    @property
    def key(self) -> str:
        """The sample's key."""
        return self.sample.key

    @property
    def members(self) -> tuple[MemberPlan, ...]:
        """The members in file order; computed anew each time, so that a plan of a million samples stays small."""
        return tuple(place_members(self.sample, self.layout, self.start))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One shard: which samples, where, and the exact size of the file."""

    number: int
    layout: DatasetLayout
    samples: tuple[PlacedSample, ...]
    size_bytes: int

    @property
    def name(self) -> str:
        """Path within the dataset: `data/train-00000.tar`."""
        return shard_name(self.number)

    @property
    def num_tokens(self) -> int:
        """Tokens of all its samples."""
        return sum(placed.sample.num_tokens for placed in self.samples)

    def without(self, keys: Iterable[str]) -> ShardPlan:
        """Return this shard laid out without some samples, under the same number; it may be left empty."""
        left_out = frozenset(keys)
        kept = [placed.sample for placed in self.samples if placed.key not in left_out]
        return lay_out_shard(self.number, kept, self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole dataset."""

    layout: DatasetLayout
    shard_size_bytes: int
    shuffle_seed: int | None
    shards: tuple[ShardPlan, ...]
    oversize: tuple[str, ...]
    """Keys of samples that are larger than a shard may be; each has a shard of its own."""

    codec: Codec = Codec.PLAIN
    """What the finished shards are recoded with; sizes and places here are those of plain ones."""

    @property
    def stored_layout(self) -> DatasetLayout:
        """The layout of the finished shards."""
        return replace(self.layout, codec=self.codec)

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.size_bytes for shard in self.shards)


def plan_dataset(
    samples: Sequence[PlannedSample],
    layout: DatasetLayout,
    *,
    shard_size_bytes: int,
    shuffle_seed: int | None = None,
    shard_multiple: int = 1,
) -> Plan:
    """Divide `samples` over shards, in their order or in the one that `shuffle_seed` gives.

    With `shard_multiple` N the number of shards is divisible by N, and they have about the same number of tokens: stock
    readers on N nodes then give each node whole shards, where else every node reads all of them.

    Raises:
        UsageError: the shard size is 50 GB or more, or there are too few samples for such a number of shards.
        DuplicateKeyError: two samples have one key.
        SampleTooLongError: a sample has more tokens than a member may hold.
    """
    if shard_size_bytes >= REFUSED_SHARD_BYTES:
        raise UsageError(
            f"a shard size of {format_size(shard_size_bytes)} ({counted(shard_size_bytes, 'byte')}) is too large",
            why="The Hub refuses files over 50 GB",
            mend="Give --shard-size 2GB, or anything below 50GB",
        )
    _check_samples(samples, layout)
    ordered = samples if shuffle_seed is None else shuffled(samples, shuffle_seed)
    shards = tuple(_divide(ordered, layout, shard_size_bytes))
    if shard_multiple > 1 and shards:
        shards = _balanced(ordered, shards, shard_size_bytes, shard_multiple)
    oversize = tuple(shard.samples[0].key for shard in shards if shard.size_bytes > shard_size_bytes)
    return Plan(
        layout=layout, shard_size_bytes=shard_size_bytes, shuffle_seed=shuffle_seed, shards=shards, oversize=oversize
    )


def plan_by(sharding: Sharding, samples: Sequence[PlannedSample], layout: DatasetLayout) -> Plan:
    """Return the plan of `samples` by the settings of a pack; errors as `plan_dataset`."""
    plan = plan_dataset(
        samples,
        layout,
        shard_size_bytes=sharding.shard_size_bytes,
        shuffle_seed=sharding.shuffle_seed,
        shard_multiple=sharding.shard_multiple,
    )
    return replace(plan, codec=sharding.codec)


def shuffled(samples: Sequence[PlannedSample], seed: int) -> list[PlannedSample]:
    """Return the samples sorted by the BLAKE2b of `<seed>:<key>`: the same order on every machine and Python."""

    def rank(sample: PlannedSample) -> bytes:
        return hashlib.blake2b(f"{seed}:{sample.key}".encode(), digest_size=16).digest()

    return sorted(samples, key=rank)


def lay_out_shard(number: int, samples: Sequence[PlannedSample], layout: DatasetLayout) -> ShardPlan:
    """Place `samples` one after another in shard `number`, whatever its size becomes."""
    placed, end = [], 0
    for sample in samples:
        placed.append(place_sample(sample, layout, end))
        end = placed[-1].end
    return ShardPlan(number=number, layout=layout, samples=tuple(placed), size_bytes=file_bytes(end))


def place_sample(sample: PlannedSample, layout: DatasetLayout, start: int) -> PlacedSample:
    """Return `sample` at offset `start`; how long it is there depends on the start, by the padding."""
    end = start
    for member in place_members(sample, layout, start):
        end = member.end
    return PlacedSample(sample=sample, layout=layout, start=start, end=end)


def place_members(sample: PlannedSample, layout: DatasetLayout, start: int) -> Iterator[MemberPlan]:
    """Yield the members of a sample that begins at offset `start`, in file order."""
    meta = MemberPlan(
        name=f"{sample.key}.{META_MEMBER}",
        array=META,
        header_offset=start,
        npy_bytes=0,
        data_bytes=_meta_bytes(sample, layout.layers),
    )
    yield meta
    offset = meta.end
    for spec in layout.specs:
        data_bytes = sample.num_tokens * spec.row_bytes
        is_padded = spec.is_state and data_bytes >= MIN_PADDED_ARRAY_BYTES
        member = MemberPlan(
            name=f"{sample.key}.{spec.member}",
            array=spec.name,
            header_offset=offset,
            npy_bytes=padded_header_bytes(offset + BLOCK, data_bytes) if is_padded else PLAIN_HEADER_BYTES,
            data_bytes=data_bytes,
        )
        yield member
        offset = member.end


def _divide(samples: Iterable[PlannedSample], layout: DatasetLayout, limit: int) -> Iterator[ShardPlan]:
    number, placed = 0, list[PlacedSample]()
    for sample in samples:
        here = place_sample(sample, layout, placed[-1].end if placed else 0)
        if placed and file_bytes(here.end) > limit:
            yield _shard(number, layout, placed)
            number, placed = number + 1, []
            here = place_sample(sample, layout, 0)
        placed.append(here)
    if placed:
        yield _shard(number, layout, placed)


def _balanced(
    samples: Sequence[PlannedSample], filled: Sequence[ShardPlan], limit: int, multiple: int
) -> tuple[ShardPlan, ...]:
    """Return shards of about equal tokens, in a number divisible by `multiple`, from `filled`, the fewest that can be.

    Shards that are cut at even shares of the tokens may need a few more of them than full ones do.
    """
    layout, fewest = filled[0].layout, -(-len(filled) // multiple) * multiple
    if fewest > len(samples):
        raise UsageError(
            f"{counted(len(samples), 'sample')} can fill no shard count divisible by {multiple}, {len(filled)} or more",
            why="Samples are never cut, and a shard holds one at least",
            mend="Give a smaller --shard-multiple, or a larger --shard-size",
        )
    for number in (fewest + step * multiple for step in range(_MOST_TRIES)):
        if number <= len(samples) and (shards := _cut_evenly(samples, layout, limit, number)):
            return shards
    groups = [[placed.sample for placed in shard.samples] for shard in filled]
    while len(groups) < fewest:
        place = max(range(len(groups)), key=lambda place: len(groups[place]))
        middle = len(groups[place]) // 2
        groups[place : place + 1] = [groups[place][:middle], groups[place][middle:]]
    return tuple(lay_out_shard(number, group, layout) for number, group in enumerate(groups))


def _cut_evenly(
    samples: Sequence[PlannedSample], layout: DatasetLayout, limit: int, count: int
) -> tuple[ShardPlan, ...] | None:
    """Return `count` shards, each cut where the tokens so far are nearest to its share; None: they do not hold all."""
    total, seen, at = sum(sample.num_tokens for sample in samples), 0, 0
    shards = []
    for number in range(count):
        placed = list[PlacedSample]()
        last = len(samples) - (count - number - 1)  # each shard after this one needs a sample
        while at < last:
            here = place_sample(samples[at], layout, placed[-1].end if placed else 0)
            is_past = (2 * seen + samples[at].num_tokens) * count >= 2 * total * (number + 1)
            if placed and (is_past or file_bytes(here.end) > limit):
                break
            placed.append(here)
            seen, at = seen + samples[at].num_tokens, at + 1
        shards.append(_shard(number, layout, placed))
    return tuple(shards) if at == len(samples) else None


def _shard(number: int, layout: DatasetLayout, placed: Sequence[PlacedSample]) -> ShardPlan:
    return ShardPlan(number=number, layout=layout, samples=tuple(placed), size_bytes=file_bytes(placed[-1].end))


def _check_samples(samples: Iterable[PlannedSample], layout: DatasetLayout) -> None:
    ids: dict[str, str] = {}
    for sample in samples:
        if sample.key in ids:
            raise DuplicateKeyError(
                f"key {sample.key} is used by two samples: id {ids[sample.key]!r} and id {sample.id!r}",
                why="Readers would merge them into one sample",
                mend="Give each prompt an id of its own",
            )
        ids[sample.key] = sample.id
        if sample.num_tokens > layout.max_tokens:
            raise SampleTooLongError(
                f"{sample.key}: {counted(sample.num_tokens, 'token')} of width {layout.hidden_size} are over 2 GiB",
                why="Arrow, and so `datasets`, can't hold it",
                mend=f"Extract with --max-tokens {layout.max_tokens} or less",
            )


def _meta_bytes(sample: PlannedSample, layers: tuple[int, ...]) -> int:
    meta = SampleMeta(
        key=sample.key,
        id=sample.id,
        source=sample.source,
        num_tokens=sample.num_tokens,
        num_trainable=0,
        next_token=NO_NEXT_TOKEN,
        xxh3_128={},
    )
    return meta_bytes(meta, layers)


@lru_cache(maxsize=64)
def _specs(layers: tuple[int, ...], hidden_size: int, codec: Codec) -> tuple[ArraySpec, ...]:
    return array_specs(layers, hidden_size, codec)
