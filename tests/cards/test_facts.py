"""Every figure of the card follows from the manifest."""

from dataclasses import replace

import pytest
from eaglehs.cards.facts import card_facts
from eaglehs.cards.render import render_card
from eaglehs.cards.report import render_report
from eaglehs.schemas.manifest import Totals

from tests.factories.manifests import make_manifest
from tests.factories.statistics import make_statistics


def test_the_reference_run_has_its_known_figures():
    kimi = replace(make_manifest().model, hidden_size=7168)
    totals = Totals(num_samples=10_000, num_tokens=17_300_000, num_trainable=8_650_000, size_bytes=992_400_000_000)
    facts = card_facts(make_manifest(model=kimi, totals=totals))
    assert facts.bytes_per_token == 4 * 2 * 7168 + 5
    assert facts.payload_bytes == 17_300_000 * 57_349
    assert facts.size_category == "10K<n<100K"
    rows = dict(facts.rows)
    assert rows["mean sample"] == "1,730 tokens, 99.2 MB"
    assert rows["tokens to train on (loss mask 1)"] == "8,650,000 (50.0 %)"
    assert facts.default_buffer_bytes == 17_300_000 * 57_349 // 10


def test_a_small_set_fills_no_default_shuffle_buffer():
    facts = card_facts(make_manifest())
    assert facts.default_buffer_bytes == facts.payload_bytes


@pytest.mark.parametrize("name", ["/srv/models/tiny-kimi/", "models/tiny-kimi"])
def test_of_a_local_model_the_card_and_the_report_tell_the_last_part_of_its_path(name):
    manifest = make_manifest(model=replace(make_manifest().model, name=name, revision="local-0123456789abcdef"))
    assert card_facts(manifest).title == "EAGLE-3 hidden states of tiny-kimi"
    card = render_card(manifest)
    assert "| model | tiny-kimi, a local folder |" in card
    assert "the model tiny-kimi, which computed the states | the model's own license |" in card
    for page in (card, render_report(manifest, make_statistics())):
        assert "models/" not in page


def test_size_categories_are_the_hubs():
    def category(num_samples: int) -> str:
        totals = Totals(num_samples=num_samples, num_tokens=1, num_trainable=1, size_bytes=1)
        return card_facts(make_manifest(totals=totals)).size_category

    assert [category(n) for n in (999, 1_000, 99_999, 100_000, 50_000_000)] == [
        "n<1K",
        "1K<n<10K",
        "10K<n<100K",
        "100K<n<1M",
        "n>10M",
    ]


def test_the_servers_flags_are_told_without_what_is_of_its_machine_alone():
    told = "--disable-radix-cache --tp-size 8 --chat-template=… --mem-fraction-static 0.9"
    assert card_facts(make_manifest()).flags == told
    nested = replace(make_manifest().engine, command=("x", "--override", '{"path": "/home/me"}', "--dp-size", "2"))
    assert card_facts(replace(make_manifest(), engine=nested)).flags == "--override … --dp-size 2"
    engine = replace(make_manifest().engine, command=())
    assert card_facts(replace(make_manifest(), engine=engine)).flags == ""
    assert "| flags | --disable-radix-cache --tp-size 8" in render_card(make_manifest())
    assert "| flags |" not in render_card(replace(make_manifest(), engine=engine))
