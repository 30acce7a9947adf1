"""The report's page: parses, refers to nothing outside itself, and shows the numbers that were measured."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from eaglehs.cards.report import ReportExtras, render_report, write_report
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.statistics import DatasetStatistics, PlotsFolder

from tests.factories.manifests import make_manifest
from tests.factories.statistics import NORMS, make_excerpt, make_statistics, make_verified

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags in their order, checked to be closed; texts of cells and tokens."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data.strip()


def page_of(**changes: object) -> Page:
    extras = ReportExtras(excerpts=(make_excerpt(), make_excerpt("p1")))
    return Page(render_report(make_manifest(), make_statistics(**changes), extras))


def test_every_element_is_closed_and_the_charts_are_all_there():
    page = page_of()
    assert [tag for tag, _ in page.tags].count("svg") == 7
    assert {attrs["id"] for tag, attrs in page.tags if tag == "figure"} >= {"lengths", "norms", "positions", "cosines"}


def test_nothing_refers_outside_the_page_and_its_policy_forbids_it():
    html = render_report(make_manifest(), make_statistics(), ReportExtras(excerpts=(make_excerpt(),)))
    for tag, attrs in Page(html).tags:
        assert tag not in ("link", "img", "iframe", "object", "base", "form")
        assert not {"src", "href", "srcset", "action", "xlink:href"} & set(attrs), (tag, attrs)
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp", html)
    assert "default-src 'none'" in html


def test_the_agreement_on_next_tokens_is_shown_or_how_to_get_it():
    verified = make_verified(num_rows=1168, num_next_tokens=9, num_next_agree=8, same_token_share=0.786)
    page = Page(render_report(make_manifest(), make_statistics(), ReportExtras(verified=verified)))
    assert [row[1:] for row in page.rows if "LM head" in row[0]] == [["9 samples", "8"], ["1,168 rows", "78.6 %"]]
    assert "--write-report, then eaglehs report again" in page_of().text
    assert "--write-report" not in page.text


def test_dark_and_light_are_both_there_for_every_colour():
    html = render_report(make_manifest(), make_statistics())
    light, dark = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    names = re.findall(r"(--[a-z0-9]+):", light)
    assert names == re.findall(r"(--[a-z0-9]+):", dark)
    assert set(re.findall(r"var\((--[a-z0-9]+)\)", html)) <= set(names)
    assert "prefers-color-scheme: dark" in html


def test_the_tables_show_the_measured_numbers():
    rows = page_of().rows
    assert ["layer_31", "12.25", "6.125", "9.188", "12.25", "15.31", "18.38", "0.1", "1", "1"] in rows
    assert ["final", "5", "150", "2", "1,500", "p1", "0"] in rows
    assert ["layer_31 · layer_59", "0.875", "0.787", "0.831", "0.875", "0.919", "0.963"] in rows
    assert ["data/train-00001.tar", "1", "12", "10,240"] in rows


def test_a_part_that_was_measured_is_said_to_be_a_part():
    assert "States:\nall of them (42 tokens)" in page_of().text
    assert "States:\n3 of them, evenly spaced" in page_of(num_samples=10_000).text


def test_tokens_carry_mask_id_and_norms():
    page = page_of()
    box = next(attrs for tag, attrs in page.tags if attrs.get("class") == "tokens ids")
    norms = json.loads(box["data-norms"])
    assert set(norms) == set(NORMS)
    assert norms["layer_31"] == [12.25, 24.5, 4.083, 12.25]
    spans = [attrs for tag, attrs in page.tags if tag == "span" and "title" in attrs][:4]
    assert [(attrs["title"], attrs.get("class")) for attrs in spans] == [
        ("0: id 11", None),
        ("1: id 22", None),
        ("2: id 33", "t"),
        ("3: id 44", "t"),
    ]
    assert "the first 4 are shown" in page.text


def test_text_of_tokens_is_shown_with_visible_breaks_and_can_not_become_markup():
    texts = ("<b>hi</b>", "\n", "\x00</script>", "\udcff")
    extras = ReportExtras(excerpts=(make_excerpt(texts=texts, id='"><img src=x>'),))
    html = render_report(make_manifest(), make_statistics(), extras)
    page = Page(html)
    assert "<b>hi</b>⏎\\x00</script>?" in page.text.replace("\n", "")
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert [tag for tag, _ in page.tags].count("br") == 1
    assert [attrs["class"] for tag, attrs in page.tags if (attrs.get("class") or "").startswith("tokens")] == ["tokens"]


def test_hostile_names_stay_text():
    manifest = make_manifest(model=replace(make_manifest().model, name="<script>alert(1)</script>{{ 7 * 7 }}"))
    html = render_report(manifest, make_statistics())
    assert "<script>alert" not in html
    assert "{{ 7 * 7 }}" in html
    Page(html)


def test_the_same_figures_are_the_same_page():
    assert render_report(make_manifest(), make_statistics()) == render_report(make_manifest(), make_statistics())


def test_the_folder_holds_page_figures_and_charts(tmp_path: Path):
    written = write_report(PlotsFolder(tmp_path / "plots"), make_manifest(), make_statistics(), ReportExtras())
    assert sorted(path.name for path in written) == sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert written[-1].name == "report.html"
    assert read_record(DatasetStatistics, tmp_path / "plots" / "statistics.json") == make_statistics()


@pytest.mark.parametrize("num_shards", [0, 1])
def test_a_dataset_of_next_to_nothing_has_a_page(num_shards: int):
    manifest = make_manifest(shards=make_manifest().shards[:num_shards])
    Page(render_report(manifest, make_statistics(states=(), neighbours=())))
