"""The plan: every sample once, in order, within bounds, and offsets that a real tar confirms."""

import hashlib
import io
import tarfile
from itertools import chain

import numpy as np
import pytest
from eaglehs.builder.plan import (
    DatasetLayout,
    DuplicateKeyError,
    PlannedSample,
    SampleTooLongError,
    lay_out_shard,
    plan_dataset,
)
from eaglehs.builder.plan_warnings import plan_warnings
from eaglehs.builder.tar_writer import ShardWriter
from eaglehs.schemas.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.shards import meta_of

KIMI = DatasetLayout(layers=(3, 31, 59), hidden_size=7168)


def sample(key: str, num_tokens: int, source: str = "s:0") -> PlannedSample:
    return PlannedSample(key=key, id=key.upper(), source=source, num_tokens=num_tokens)


def samples(*lengths: int) -> list[PlannedSample]:
    return [sample(f"p{i}", length) for i, length in enumerate(lengths)]


LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=40)
LAYOUTS = st.builds(
    DatasetLayout,
    layers=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(lambda ks: tuple(sorted(ks))),
    hidden_size=st.sampled_from([1, 3, 8, 128, 1024, 7168]),
)
SIZES = st.integers(1, 10**7)


@given(LENGTHS, LAYOUTS, SIZES, st.none() | st.integers(0, 9))
@settings(max_examples=60)
def test_every_sample_is_planned_once_and_no_shard_passes_the_bound(lengths, layout, limit, seed):
    plan = plan_dataset(samples(*lengths), layout, shard_size_bytes=limit, shuffle_seed=seed)
    keys = [placed.key for shard in plan.shards for placed in shard.samples]
    assert sorted(keys) == sorted(f"p{i}" for i in range(len(lengths)))
    if seed is None:
        assert keys == [f"p{i}" for i in range(len(lengths))]
    assert [shard.number for shard in plan.shards] == list(range(len(plan.shards)))
    for shard in plan.shards:
        assert shard.size_bytes <= limit or len(shard.samples) == 1
        assert (shard.size_bytes > limit) == (shard.samples[0].key in plan.oversize)
    assert plan.num_tokens == sum(lengths)


@given(LENGTHS, LAYOUTS, SIZES)
@settings(max_examples=40)
def test_a_shard_is_closed_only_when_the_next_sample_does_not_fit(lengths, layout, limit):
    plan = plan_dataset(samples(*lengths), layout, shard_size_bytes=limit)
    for shard, after in zip(plan.shards, plan.shards[1:], strict=False):
        kept = [placed.sample for placed in shard.samples]
        assert lay_out_shard(0, [*kept, after.samples[0].sample], layout).size_bytes > limit


@given(LENGTHS, LAYOUTS, SIZES, st.integers(2, 5), st.none() | st.integers(0, 9))
@settings(max_examples=80)
def test_a_shard_multiple_divides_the_number_of_shards_and_changes_nothing_else(lengths, layout, limit, multiple, seed):
    plain = plan_dataset(samples(*lengths), layout, shard_size_bytes=limit, shuffle_seed=seed)
    options = {"shard_size_bytes": limit, "shuffle_seed": seed, "shard_multiple": multiple}
    if -(-len(plain.shards) // multiple) * multiple > len(lengths):
        with pytest.raises(UsageError, match=f"divisible by {multiple}"):
            plan_dataset(samples(*lengths), layout, **options)
        return
    plan = plan_dataset(samples(*lengths), layout, **options)
    assert len(plan.shards) % multiple == 0
    keys = [[placed.key for placed in shard.samples] for shard in plan.shards]
    assert list(chain(*keys)) == [placed.key for shard in plain.shards for placed in shard.samples]
    assert all(keys)
    assert plan.oversize == plain.oversize
    for number, shard in enumerate(plan.shards):
        assert shard.size_bytes <= limit or len(shard.samples) == 1
        assert shard == lay_out_shard(number, [placed.sample for placed in shard.samples], layout)


@given(st.lists(st.integers(1, 400), min_size=30, max_size=60), st.integers(2, 8))
@settings(max_examples=40)
def test_shards_of_a_multiple_differ_from_their_share_by_less_than_a_sample(lengths, multiple):
    plan = plan_dataset(samples(*lengths), KIMI, shard_size_bytes=10**9, shard_multiple=multiple)
    share = sum(lengths) / len(plan.shards)
    assert len(plan.shards) == multiple
    if max(lengths) <= share:
        assert all(abs(shard.num_tokens - share) <= max(lengths) for shard in plan.shards)


def test_the_shards_of_a_real_run_are_nearly_full_and_equal_when_eight_readers_share_them():
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(7.25, 0.65, 2_000), 200, 8192).astype(int).tolist()
    limit = 2_000_000_000
    plain = plan_dataset(samples(*lengths), KIMI, shard_size_bytes=limit)
    plan = plan_dataset(samples(*lengths), KIMI, shard_size_bytes=limit, shard_multiple=8)
    assert len(plan.shards) % 8 == 0
    assert len(plan.shards) <= len(plain.shards) + 16
    by_reader = [sum(shard.num_tokens for shard in plan.shards[reader::8]) for reader in range(8)]
    assert max(by_reader) / min(by_reader) < 1.1


@given(LENGTHS, LAYOUTS)
@settings(max_examples=30)
def test_a_real_tar_has_every_member_where_the_plan_says(lengths, layout):
    shard = lay_out_shard(0, samples(*lengths[:6]), layout)
    content = written(shard)
    assert len(content) == shard.size_bytes
    planned = [member for placed in shard.samples for member in placed.members]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = tar.getmembers()
        assert [(m.name, m.offset, m.size) for m in found] == [(m.name, m.header_offset, m.size) for m in planned]
        for member, plan in zip(found, planned, strict=True):
            body = tar.extractfile(member).read()
            if plan.array != "meta":
                assert plan.data_offset % 64 == 0
                assert body[plan.npy_bytes :] == content[plan.data_offset : plan.data_offset + plan.data_bytes]
                assert np.load(io.BytesIO(body)).nbytes == plan.data_bytes


@given(LENGTHS, st.data())
@settings(max_examples=30)
def test_a_shard_without_some_samples_is_the_shard_of_the_others(lengths, data):
    plan = plan_dataset(samples(*lengths), KIMI, shard_size_bytes=10**8)
    shard = data.draw(st.sampled_from(plan.shards))
    left_out = data.draw(st.sets(st.sampled_from([placed.key for placed in shard.samples])))
    rest = [placed.sample for placed in shard.samples if placed.key not in left_out]
    assert shard.without(left_out) == lay_out_shard(shard.number, rest, KIMI)


def test_large_states_are_padded_and_small_ones_are_not():
    shard = lay_out_shard(0, samples(1730, 10), KIMI)
    large, small = (placed.members for placed in shard.samples)
    assert all((member.data_offset + member.data_bytes - 512) % 10_240 == 0 for member in large[3:])
    assert all(member.npy_bytes == 128 for member in (*large[1:3], *small[1:]))


def test_the_reference_run_has_the_expected_size():
    plan = plan_dataset(samples(*[1730] * 200), KIMI, shard_size_bytes=2_000_000_000)
    assert [len(shard.samples) for shard in plan.shards] == [20] * 10
    assert plan.size_bytes / (200 * 1730 * 57_349) < 1.001


def test_a_sample_larger_than_a_shard_has_its_own_and_a_warning_with_both_sizes():
    plan = plan_dataset(samples(1, 100, 1), DatasetLayout(layers=(1,), hidden_size=256), shard_size_bytes=20_480)
    assert [[placed.key for placed in shard.samples] for shard in plan.shards] == [["p0"], ["p1"], ["p2"]]
    assert plan.oversize == ("p1",)
    [warning] = plan_warnings(plan)
    assert "p1" in warning
    assert "20,480 bytes" in warning


def test_a_sample_that_fills_a_shard_to_the_byte_stays_in_it():
    layout = DatasetLayout(layers=(1,), hidden_size=8)
    size = lay_out_shard(0, samples(5, 5), layout).size_bytes
    assert len(plan_dataset(samples(5, 5), layout, shard_size_bytes=size).shards) == 1
    assert len(plan_dataset(samples(5, 5), layout, shard_size_bytes=size - 1).shards) == 2


def test_the_bound_counts_headers_of_many_tiny_samples():
    layout = DatasetLayout(layers=(1,), hidden_size=1)
    plan = plan_dataset(samples(*[10] * 200), layout, shard_size_bytes=100_000)
    assert max(shard.size_bytes for shard in plan.shards) <= 100_000
    assert len(plan.shards) > 5


def test_a_shuffle_is_fixed_by_its_seed_and_does_not_depend_on_the_other_samples():
    many = samples(*range(1, 101))
    first = [p.key for s in plan_dataset(many, KIMI, shard_size_bytes=10**9, shuffle_seed=1).shards for p in s.samples]
    again = [p.key for s in plan_dataset(many, KIMI, shard_size_bytes=10**6, shuffle_seed=1).shards for p in s.samples]
    other = [p.key for s in plan_dataset(many, KIMI, shard_size_bytes=10**9, shuffle_seed=2).shards for p in s.samples]
    assert first == again != other
    fewer = plan_dataset(many[:50], KIMI, shard_size_bytes=10**9, shuffle_seed=1)
    kept = {sample.key for sample in many[:50]}
    assert [p.key for s in fewer.shards for p in s.samples] == [key for key in first if key in kept]
    by_definition = sorted(first, key=lambda key: hashlib.blake2b(f"1:{key}".encode(), digest_size=16).digest())
    assert first == by_definition
    assert first[:3] == ["p3", "p78", "p43"]  # pinned: a change would silently mix datasets in another way


def test_repeated_keys_are_refused_with_both_ids():
    twins = [sample("a", 3), PlannedSample(key="a", id="other", source="s", num_tokens=3)]
    with pytest.raises(DuplicateKeyError, match=r"'A' and id 'other'"):
        plan_dataset(twins, KIMI, shard_size_bytes=10**9)


@pytest.mark.parametrize("size", [50 * 10**9, 60 * 10**9])
def test_shards_of_50_gb_are_refused_with_the_size(size):
    with pytest.raises(UsageError, match="2GB"):
        plan_dataset(samples(1), KIMI, shard_size_bytes=size)


def test_shards_over_20_gb_get_a_warning():
    assert any("20 GB" in text for text in plan_warnings(plan_dataset(samples(1), KIMI, shard_size_bytes=21 * 10**9)))


@pytest.mark.parametrize(("num_samples", "is_told"), [(160, False), (140, True), (9, False)])
def test_few_shards_of_much_data_get_a_warning_about_idle_workers(num_samples, is_told):
    """20 samples a shard: 8 shards are enough, 7 are not, and less than a gigabyte is read in no time."""
    plan = plan_dataset(samples(*[1730] * num_samples), KIMI, shard_size_bytes=2_000_000_000)
    told = list(plan_warnings(plan))
    assert len(told) == is_told
    assert all("7 shards: stock readers keep no more than 7 workers" in text for text in told)


def test_a_sample_whose_states_pass_2_gib_is_refused_with_the_token_limit():
    with pytest.raises(SampleTooLongError, match=f"--max-tokens {KIMI.max_tokens}"):
        plan_dataset(samples(1, KIMI.max_tokens + 1), KIMI, shard_size_bytes=2 * 10**9)
    plan = plan_dataset(samples(KIMI.max_tokens), KIMI, shard_size_bytes=2 * 10**9)
    assert max(member.size for member in plan.shards[0].samples[0].members) <= 2_147_483_646


def written(shard) -> bytes:
    """The file of a shard whose arrays are all ones."""
    import tempfile

    with tempfile.TemporaryFile() as out:
        writer = ShardWriter(out, shard)
        for placed in reversed(shard.samples):  # any order
            arrays = {member.array: b"\1" * member.data_bytes for member in placed.members[1:]}
            pieces = {name: [content] for name, content in arrays.items()}
            writer.write_sample(placed, meta_of(placed, arrays), pieces)
        out.seek(0)
        return out.read()
