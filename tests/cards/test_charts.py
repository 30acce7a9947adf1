"""Charts hold the measured numbers under the right labels, and their axes hold the values."""

from dataclasses import replace

import pytest
from eaglehs.cards.axis import axis_of, tick_text
from eaglehs.cards.charts import CARD_CHARTS, Chart, Mark, Series, charts
from eaglehs.schemas.manifest import ShardEntry

from tests.factories.manifests import make_manifest
from tests.factories.statistics import NORMS, make_state, make_statistics


def chart_of(name: str, **changes: object) -> Chart:
    found = charts(make_manifest(), make_statistics(**changes))
    return next(chart for chart in found if chart.name == name)


def bars(values: tuple[float, ...], **changes: object) -> Chart:
    labels = tuple(map(str, range(len(values))))
    chart = Chart(
        name="x",
        title="t",
        caption="c",
        mark=Mark.BARS,
        x_label="x",
        y_label="y",
        labels=labels,
        series=(Series(name="s", values=values),),
    )
    return replace(chart, **changes)  # type: ignore[arg-type]


def test_there_is_a_chart_for_everything_measured_and_the_cards_are_among_them():
    names = [chart.name for chart in charts(make_manifest(), make_statistics())]
    assert names == ["lengths", "trainable", "norms", "channels", "positions", "cosines", "shards"]
    assert set(CARD_CHARTS) <= set(names)


def test_every_series_has_a_value_or_none_for_every_label():
    for chart in charts(make_manifest(), make_statistics()):
        assert all(len(series.values) == len(chart.labels) for series in chart.series), chart.name


def test_histograms_are_labelled_by_where_a_bar_begins():
    lengths = chart_of("lengths")
    assert (lengths.labels, lengths.series[0].values) == (("10", "12", "14"), (0.0, 2.0, 1.0))
    shares = chart_of("trainable")
    assert (shares.labels, shares.series[0].values) == (("0", "50"), (1.0, 2.0))


def test_norms_are_boxes_by_state():
    norms = chart_of("norms")
    assert norms.labels == tuple(NORMS)
    assert [series.name for series in norms.series] == ["5 %", "25 %", "median", "75 %", "95 %"]
    assert norms.series[2].values == tuple(NORMS.values())


def test_a_position_without_rows_is_a_gap_and_not_a_zero():
    positions = chart_of("positions")
    assert positions.labels == ("0", "1", "2-3", "4-7", "8-15")
    assert positions.series[0].values == (6.0, 1.5, 1.5, None, 1.5)


def test_channels_are_named_and_outliers_counted():
    channels = chart_of("channels", states=(make_state("layer_3", 1.0, ratio=1234.5),))
    assert channels.labels == ("layer_3 #5", "layer_3 #7")
    assert channels.series[0].values == (1234.5, 7.5)
    assert "Channels above 100: layer_3 1." in channels.caption


def test_many_shards_are_shown_as_means_of_groups():
    shards = tuple(
        ShardEntry(name=f"data/train-{n:05d}.tar", num_samples=1, num_tokens=n, size_bytes=n * 10**6, sha256="a" * 64)
        for n in range(1, 131)
    )
    chart = charts(make_manifest(shards=shards), make_statistics())[-1]
    assert (chart.y_label, len(chart.labels)) == ("MB", 44)
    assert chart.series[0].values[:2] == (2.0, 5.0)
    assert chart.series[0].values[-1] == 130.0
    assert chart.caption == "130 shards of 1 to 130 tokens; a bar is the mean of 3."


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((9.0, 2.0), (0.0, 2.5, 5.0, 7.5, 10.0)),
        ((0.0, 0.0), (0.0, 0.25, 0.5, 0.75, 1.0)),
        ((400.0,), (0.0, 100.0, 200.0, 300.0, 400.0)),
        ((0.003,), (0.0, 0.001, 0.002, 0.003)),
    ],
)
def test_a_linear_axis_ends_at_a_round_number_above_all_values(values, ticks):
    axis = axis_of(bars(values))
    assert axis.ticks == pytest.approx(ticks)
    assert axis.high >= max(values)


def test_counts_have_whole_ticks():
    axis = axis_of(bars((1.0, 2.0), y_label="samples"))
    assert all(tick == int(tick) for tick in axis.ticks)


@pytest.mark.parametrize(
    ("values", "low", "high"), [((3.0, 70.0), 1, 100), ((1.0,), 1, 10), ((0.002, 5e7), 1e-3, 1e8), ((), 1, 10)]
)
def test_a_logarithmic_axis_ends_at_powers_of_ten(values, low, high):
    axis = axis_of(bars(values, is_log=True))
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert axis.place(0.0) == 0


def test_places_are_shares_of_the_axis():
    axis = axis_of(bars((10.0, 1000.0), is_log=True))
    assert [axis.place(value) for value in (10.0, 100.0, 1000.0)] == pytest.approx([0, 0.5, 1])
    assert axis_of(bars((400.0,))).place(100) == pytest.approx(0.25)


def test_ticks_are_written_as_people_write_them():
    assert [tick_text(value) for value in (0.0, 0.25, 20.0, 1500.0, 2e6)] == ["0", "0.25", "20", "1,500", "2e+06"]
