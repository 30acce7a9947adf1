"""`eaglehs card`: write a dataset's README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from .options import JsonFlag


def card(
    dataset: Annotated[Path, typer.Argument(metavar="[DATASET]", help="A folder that `eaglehs pack` wrote.")] = Path(
        "dataset"
    ),
    json: JsonFlag = False,
) -> None:
    """Write the dataset's card (README.md) anew from its manifest.json.

    Its front matter is what lets stock `datasets` load the folder with typed columns. A license that is in the card
    already stays.

    eaglehs card

    eaglehs card kimi-k25-hs --json
    """
    from ..cards.write import write_card

    path = write_card(dataset)
    console.print_json({"card": str(path)}) if json else console.out(str(path))
