"""The tallies at the edges of what bfloat16 holds: huge, tiny and no values, and outliers by their definition."""

import math

import numpy as np
import pytest
import torch
from eaglehs.builder.state_statistics import CosineTally, NotFiniteError, StateTally
from eaglehs.schemas import codec

pytestmark = pytest.mark.filterwarnings("error")


def tally_of(values: torch.Tensor, key: str = "p0"):
    tally = StateTally("layer_3", values.shape[1])
    tally.update(key, 0, values)
    return tally.statistics()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e36])
def test_values_of_any_size_have_their_norms_and_means(scale: float):
    values = torch.tensor([[3.0, -4.0], [6.0, 8.0]]).mul(scale)
    found = tally_of(values)
    assert (found.norms.lowest, found.norms.highest) == (
        pytest.approx(5 * scale, rel=1e-5),
        pytest.approx(10 * scale, rel=1e-5),
    )
    assert found.norms.mean == pytest.approx(7.5 * scale, rel=1e-5)
    assert found.norms_by_position == (pytest.approx(5 * scale, rel=1e-5), pytest.approx(10 * scale, rel=1e-5))
    means = {channel.channel: channel.mean_magnitude for channel in found.top_channels}
    assert means == {0: pytest.approx(4.5 * scale, rel=1e-5), 1: pytest.approx(6 * scale, rel=1e-5)}
    assert "Infinity" not in codec.dumps(found)


def test_rows_of_zeros_count_as_norm_zero_and_have_no_cosine():
    zeros = torch.zeros(3, 4)
    found = tally_of(zeros)
    assert (found.norms.lowest, found.norms.median, found.norms.highest) == (0, 0, 0)
    assert found.num_outlier_channels == 0
    cosines = CosineTally("a", "b")
    cosines.update(zeros, torch.ones(3, 4), np.zeros(3), np.full(3, 2.0))
    assert cosines.statistics().cosine.mean == 0


def test_nothing_at_all_is_all_zeros():
    found = StateTally("final", 4).statistics()
    assert (found.norms.mean, found.norms_by_position, found.top_channels) == (0, (), ())


def test_equal_opposite_and_square_rows_have_cosines_1_minus_1_and_0():
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    second = torch.tensor([[2.0, 0.0], [-3.0, 0.0], [0.0, 1.0]])
    tally = CosineTally("a", "b")
    tally.update(first, second, np.ones(3), np.array([2.0, 3.0, 1.0]))
    found = tally.statistics().cosine
    assert (found.lowest, found.median, found.highest) == (-1, pytest.approx(0, abs=1e-3), 1)


def test_outlier_and_massive_channels_are_counted_by_their_largest_value():
    values = torch.ones(10, 64)
    values[7, 5] = 150.0  # over 100 times the median, which is 1
    values[3, 9] = -1500.0
    found = tally_of(values, key="p4")
    assert (found.num_outlier_channels, found.num_massive_channels) == (2, 1)
    assert [(top.channel, top.row, top.key, top.ratio) for top in found.top_channels[:2]] == [
        (9, 3, "p4", 1500.0),
        (5, 7, "p4", 150.0),
    ]


def test_the_place_of_a_maximum_is_that_of_the_sample_that_holds_it():
    tally = StateTally("layer_3", 2)
    for number, key in enumerate(("p0", "p1", "p2")):
        values = torch.ones(4, 2)
        values[2, 0] = [5.0, 9.0, 7.0][number]
        tally.update(key, 0, values[:2])
        tally.update(key, 2, values[2:])
    top = tally.statistics().top_channels[0]
    assert (top.channel, top.key, top.row, top.max_magnitude) == (0, "p1", 2, 9.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_first_row_that_is_no_number_is_named(value: float):
    values = torch.ones(4, 2)
    values[2, 1] = value
    tally = StateTally("layer_3", 2)
    with pytest.raises(NotFiniteError, match=r"row 12 of layer_3 of sample p0"):
        tally.update("p0", 10, values)
