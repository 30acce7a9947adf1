"""Make the golden files that may be made anew: `make goldens`.

Allowed when a change of the help text or of the card's text is meant; read the difference before it is committed. A
change of the card's front matter is a change of format and needs a `Format` line in CHANGELOG.md. The records
(`run.json`, `ledger.jsonl`, `capture.json`, `sample.meta.json`) and the shard are written from the format text and are
never made by a program.
"""

from pathlib import Path

from eaglehs.cards.render import render_card

from tests.eaglehs.test_main import help_of_all_commands
from tests.factories.manifests import make_manifest
from tests.factories.statistics import make_extras

GOLDEN = Path(__file__).parent

if __name__ == "__main__":
    (GOLDEN / "help.txt").write_text(help_of_all_commands(), encoding="utf-8")
    (GOLDEN / "card.md").write_text(render_card(make_manifest()), encoding="utf-8")
    (GOLDEN / "card_full.md").write_text(render_card(make_manifest(), make_extras()), encoding="utf-8")
