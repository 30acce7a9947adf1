"""Each chart becomes a PNG and an SVG; without matplotlib the user is told which extra brings it."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from eaglehs.cards.charts import charts
from eaglehs.cards.plots import write_plots
from eaglehs.cards.svg import chart_svg
from eaglehs.schemas.errors import MissingPackageError
from eaglehs.schemas.statistics import PlotsFolder

from tests.factories.manifests import make_manifest
from tests.factories.statistics import make_state, make_statistics

CHARTS = charts(make_manifest(), make_statistics())


def test_each_chart_is_a_png_of_its_name_and_the_same_bytes_again(tmp_path: Path):
    written = write_plots(CHARTS[:3], PlotsFolder(tmp_path))
    assert [path.name for path in written] == ["lengths.png", "trainable.png", "norms.png"]
    first = [path.read_bytes() for path in written]
    assert all(content.startswith(b"\x89PNG\r\n") for content in first)
    write_plots(CHARTS[:3], PlotsFolder(tmp_path))
    assert [path.read_bytes() for path in written] == first


def test_every_kind_of_chart_can_be_drawn(tmp_path: Path):
    assert len(write_plots(CHARTS, PlotsFolder(tmp_path))) == 7


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"matplotlib.*pip install 'eaglehs\[plots\]'"):
        write_plots(CHARTS, PlotsFolder(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_an_svg_is_well_formed_and_everything_in_it_lies_in_its_frame(chart):
    root = ET.fromstring(chart_svg(chart))
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    assert root.find("title").text == chart.title
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.get(name, 0)) <= height
        assert float(element.get("height", 0)) >= 0


def test_bars_are_as_high_as_their_values():
    root = ET.fromstring(chart_svg(CHARTS[0]))
    heights = [float(bar.attrib["height"]) for bar in root.iter("rect")]
    assert len(heights) == 2  # a bin of no samples has no bar
    assert heights[0] == pytest.approx(2 * heights[1], rel=0.01)


def test_names_from_outside_are_escaped():
    states = (make_state("<script>&", 1.0),)
    chart = charts(make_manifest(), make_statistics(states=states))[2]
    assert "<script>" not in chart_svg(chart)
    assert ET.fromstring(chart_svg(chart)) is not None
