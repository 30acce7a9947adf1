"""The report's figures against numpy over the same rows at once: every number that `measure_dataset` gives."""

from pathlib import Path

import numpy as np
import pytest
from eaglehs.builder import statistics as module
from eaglehs.builder.state_statistics import NotFiniteError
from eaglehs.builder.statistics import MeasureSettings, measure_dataset
from eaglehs.schemas import codec
from eaglehs.schemas.errors import UsageError
from eaglehs.schemas.statistics import DatasetStatistics, position_bins, shards_fingerprint

from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.readable import make_readable

LENGTHS = (5, 12, 33, 40, 7, 60)
LAYERS = (2, 5, 9)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SyntheticDataset:
    return make_dataset(tmp_path_factory.mktemp("statistics"), lengths=LENGTHS)


def floats(dataset: SyntheticDataset, key: str, state: str) -> np.ndarray:
    bits = dataset.bits(key)[state]
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def all_rows(dataset: SyntheticDataset, state: str) -> np.ndarray:
    return np.concatenate([floats(dataset, key, state) for key in dataset.keys])


def test_norms_are_those_of_all_rows(dataset: SyntheticDataset):
    statistics = measure_dataset(dataset.root, MeasureSettings()).statistics
    assert [state.name for state in statistics.states] == ["layer_2", "layer_5", "layer_9", "final"]
    for state in statistics.states:
        norms = np.linalg.norm(all_rows(dataset, state.name), axis=1)
        assert state.norms.mean == pytest.approx(norms.mean(), rel=1e-5)
        assert state.norms.lowest == pytest.approx(norms.min(), rel=1e-5)
        assert state.norms.highest == pytest.approx(norms.max(), rel=1e-5)
        ordered = np.sort(norms)
        for name, share in (("p5", 0.05), ("p25", 0.25), ("median", 0.5), ("p75", 0.75), ("p95", 0.95)):
            exact = ordered[int(np.ceil(share * len(ordered))) - 1]
            assert getattr(state.norms, name) == pytest.approx(exact, rel=0.03), name


def test_norms_by_position_are_means_over_doubling_ranges(dataset: SyntheticDataset):
    state = measure_dataset(dataset.root, MeasureSettings()).statistics.states[1]
    assert position_bins(len(state.norms_by_position)) == ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63")
    norms = [np.linalg.norm(floats(dataset, key, "layer_5"), axis=1) for key in dataset.keys]
    ranges = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    expected = [np.concatenate([sample[start:end] for sample in norms]).mean() for start, end in ranges]
    assert state.norms_by_position == pytest.approx(expected, rel=1e-5)


def test_channels_are_ranked_by_their_largest_value_with_the_place_of_it(dataset: SyntheticDataset):
    state = measure_dataset(dataset.root, MeasureSettings()).statistics.states[2]
    magnitudes = np.abs(all_rows(dataset, "layer_9"))
    median = np.median(magnitudes.mean(axis=0))
    assert state.median_magnitude == pytest.approx(median, rel=1e-5)
    best = np.argsort(-magnitudes.max(axis=0), kind="stable")[:8]
    assert [found.channel for found in state.top_channels] == best.tolist()
    for found in state.top_channels:
        assert found.max_magnitude == pytest.approx(magnitudes[:, found.channel].max(), rel=1e-5)
        assert found.mean_magnitude == pytest.approx(magnitudes[:, found.channel].mean(), rel=1e-5)
        assert found.ratio == pytest.approx(magnitudes[:, found.channel].max() / median, rel=1e-5)
        there = abs(floats(dataset, found.key, "layer_9")[found.row, found.channel])
        assert there == pytest.approx(found.max_magnitude, rel=1e-5)
    assert (state.num_outlier_channels, state.num_massive_channels) == (0, 0)


def test_cosines_are_those_of_neighbouring_states(dataset: SyntheticDataset):
    pairs = measure_dataset(dataset.root, MeasureSettings()).statistics.neighbours
    assert [(pair.first, pair.second) for pair in pairs] == [
        ("layer_2", "layer_5"),
        ("layer_5", "layer_9"),
        ("layer_9", "final"),
    ]
    for pair in pairs:
        first, second = all_rows(dataset, pair.first), all_rows(dataset, pair.second)
        cosines = (first * second).sum(axis=1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
        assert pair.cosine.mean == pytest.approx(cosines.mean(), abs=1e-5)
        assert pair.cosine.median == pytest.approx(np.median(cosines), abs=0.02)
        assert pair.cosine.lowest == pytest.approx(cosines.min(), abs=1e-5)


def test_lengths_and_shares_count_every_sample(dataset: SyntheticDataset):
    statistics = measure_dataset(dataset.root, MeasureSettings(max_samples=2)).statistics
    assert statistics.lengths.edges == tuple(float(edge) for edge in range(5, 66, 5))
    assert statistics.lengths.counts == (2, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)
    assert sum(statistics.shares.counts) == len(LENGTHS)
    shares = [dataset.bits(key)["loss_mask"].mean() for key in dataset.keys]
    expected, _ = np.histogram(shares, bins=np.arange(21) / 20 - 1e-12)
    expected[-1] += sum(share == 1 for share in shares)
    assert statistics.shares.counts == tuple(expected)


def test_blocks_of_any_size_give_the_same_figures(dataset: SyntheticDataset, monkeypatch: pytest.MonkeyPatch):
    whole = measure_dataset(dataset.root, MeasureSettings())
    monkeypatch.setattr(module, "_BLOCK_BYTES", 4 * 16 * 3)
    parts = measure_dataset(dataset.root, MeasureSettings())
    assert parts.excerpts == whole.excerpts
    assert parts.statistics == whole.statistics


def test_few_samples_are_spread_over_the_set_and_said_to_be_few(dataset: SyntheticDataset):
    measured = measure_dataset(dataset.root, MeasureSettings(max_samples=3, num_excerpts=2, excerpt_tokens=4))
    assert (measured.statistics.num_samples, measured.statistics.num_measured) == (6, 3)
    assert measured.statistics.num_measured_tokens == 5 + 33 + 60
    assert [excerpt.key for excerpt in measured.excerpts] == ["p0", "p5"]


def test_an_excerpt_is_the_first_rows_of_its_sample(dataset: SyntheticDataset):
    excerpt = measure_dataset(dataset.root, MeasureSettings(excerpt_tokens=9)).excerpts[2]
    bits = dataset.bits("p2")
    assert (excerpt.key, excerpt.num_tokens) == ("p2", 33)
    assert excerpt.input_ids == tuple(bits["input_ids"][:9, 0])
    assert excerpt.loss_mask == tuple(bits["loss_mask"][:9, 0])
    assert set(excerpt.norms) == {"layer_2", "layer_5", "layer_9", "final"}
    assert excerpt.norms["final"] == pytest.approx(np.linalg.norm(floats(dataset, "p2", "final")[:9], axis=1))


def test_the_record_is_stored_and_read_again_and_names_its_packing(dataset: SyntheticDataset):
    statistics = measure_dataset(dataset.root, MeasureSettings()).statistics
    assert codec.loads(DatasetStatistics, codec.dumps(statistics), where="here") == statistics
    assert statistics.shards_sha256 == shards_fingerprint(dataset.manifest)


def test_a_folder_without_a_dataset_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no manifest\.json"):
        measure_dataset(tmp_path, MeasureSettings())


@pytest.mark.filterwarnings("error")
def test_a_value_that_is_no_number_is_named_and_not_averaged(tmp_path: Path):
    hostile = make_readable(tmp_path)
    with pytest.raises(NotFiniteError, match=r"row \d+ of layer_2 of sample p0 holds NaN or an infinite value"):
        measure_dataset(hostile.root, MeasureSettings())
