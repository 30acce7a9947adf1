"""The card's text: golden, complete, and unharmed by names from outside."""

from dataclasses import replace

from eaglehs.cards.render import plain, render_card

from tests.factories.manifests import make_manifest
from tests.factories.statistics import make_extras
from tests.golden.remake import GOLDEN


def test_the_card_is_the_golden_one():
    assert render_card(make_manifest()) == (GOLDEN / "card.md").read_text(encoding="utf-8")


def test_the_card_with_charts_preview_and_terms_is_the_golden_one():
    assert render_card(make_manifest(), make_extras()) == (GOLDEN / "card_full.md").read_text(encoding="utf-8")


def test_the_card_warns_of_the_servers_layer_ids_and_gives_both_lists():
    card = render_card(make_manifest())
    warning = card[card.index("**Warning: `eagle_aux_hidden_state_layer_ids`") :]
    assert "`[3, 31, 59]`" in warning
    assert "`[2, 30, 58]`" in warning


def test_the_card_shows_no_command_line_and_no_environment():
    card = render_card(make_manifest())
    assert "launch_server" not in card
    assert "NCCL_DEBUG" not in card


def test_text_from_outside_can_neither_break_a_table_nor_run_as_template_or_html():
    manifest = make_manifest(
        prompts=replace(make_manifest().prompts, source="a|b\n# heading {{ 7 * 7 }} <img src=x>", skipped={"x|y": 1})
    )
    card = render_card(manifest)
    assert r"a\|b \# heading \{\{ 7 \* 7 \}\} \<img src=x\>" in card
    assert r"| prompts left out: x\|y | 1 |" in card
    assert "49" not in card[card.index("## How it was made") : card.index("## What was checked")]


def test_plain_leaves_everyday_text_alone():
    assert plain("moonshotai/Kimi-K2.5 (rev 1)") == "moonshotai/Kimi-K2.5 (rev 1)"
