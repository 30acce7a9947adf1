"""Remake tests/golden/card.md: `python -m tests.golden.remake_card`.

Allowed when the card's text is changed on purpose; read the difference before it is committed. A change of the front
matter is a change of format and needs a `Format` line in CHANGELOG.md.
"""

from pathlib import Path

from eaglehs.cards.render import render_card

from tests.factories.manifests import make_manifest

GOLDEN_CARD = Path(__file__).with_name("card.md")

if __name__ == "__main__":
    GOLDEN_CARD.write_text(render_card(make_manifest()), encoding="utf-8")
