"""`eaglehs card`: write a dataset's README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from .options import JsonFlag, TrustFlag, refuse_idle


def card(
    context: typer.Context,
    dataset: Annotated[Path, typer.Argument(metavar="[DATASET]", help="A folder that `eaglehs pack` wrote.")] = Path(
        "dataset"
    ),
    license_id: Annotated[
        str, typer.Option("--license", metavar="ID", help="The dataset's license, as the Hub writes it: cc-by-4.0.")
    ] = "",
    license_name: Annotated[str, typer.Option("--license-name", help="What `--license other` is called.")] = "",
    license_link: Annotated[str, typer.Option("--license-link", help="Where its text is.")] = "",
    model_terms: Annotated[str, typer.Option("--model-terms", help="The target model's license, in words.")] = "",
    prompts_terms: Annotated[str, typer.Option("--prompts-terms", help="The prompts' license, in words.")] = "",
    preview: Annotated[
        int | None, typer.Option("--preview", min=0, metavar="N", help="Samples for the Hub's viewer; 0 takes it away.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Model whose tokenizer adds the text to --preview.")
    ] = None,
    trust_remote_code: TrustFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write the dataset's card (README.md) anew from its manifest.json.

    Its front matter is what lets stock `datasets` load the folder with typed columns. Terms that are in the card
    already stay. Charts of `eaglehs report` are shown. --preview writes N samples without states (ids, mask, lengths,
    text) as a second config, which the Hub's viewer can show.

    eaglehs card --license cc-by-4.0 --model-terms "Modified MIT" --prompts-terms "apache-2.0"

    eaglehs card kimi-k25-hs --preview 100 --tokenizer moonshotai/Kimi-K2.5 --trust-remote-code
    """
    from ..cards.licenses import CardTerms
    from ..dataset_card import CardSettings, make_card

    terms = CardTerms(
        license=license_id,
        license_name=license_name,
        license_link=license_link,
        model_terms=model_terms,
        prompts_terms=prompts_terms,
    )
    if tokenizer is None:
        refuse_idle(context, ("trust_remote_code",), without="without --tokenizer")
    settings = CardSettings(terms=terms, num_preview=preview, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    summary = make_card(dataset, settings)
    for fault in summary.faults:
        console.say(f"before it can be published: {fault}")
    console.print_json(summary) if json else console.out(summary.card)
