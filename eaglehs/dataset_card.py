"""A dataset's card with its preview: samples by the builder, text by the model's tokenizer, README.md by the cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .builder.preview import PreviewSettings, ToText, remove_preview, write_preview
from .builder.publish_card import set_license
from .cards.features import read_kept
from .cards.licenses import CardTerms, merge_terms
from .cards.validate import card_faults
from .cards.write import is_as_written, write_card
from .schemas.errors import UsageError
from .schemas.manifest import DatasetFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSettings:
    """What the user asked for."""

    terms: CardTerms = field(default_factory=CardTerms)
    num_preview: int | None = None
    """Samples of a new preview; 0 takes it away, None leaves it as it is."""

    tokenizer: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSummary:
    """What was written."""

    card: str
    faults: tuple[str, ...]
    """What the Hub, or a reader, would not take; the card is there all the same."""


def make_card(dataset: Path, settings: CardSettings) -> CardSummary:
    """Write README.md of the packed dataset in the folder `dataset`, after its preview if one is asked for.

    Raises:
        UsageError: no packed dataset is there, the terms can't be, or a tokenizer is given without a preview.
        DataError: manifest, index and shards do not belong together.
        StorageError: the tokenizer can't be had.
    """
    if settings.tokenizer is not None and not settings.num_preview:
        raise UsageError("--tokenizer without --preview N has no effect", mend="Give both")
    if settings.num_preview:
        write_preview(dataset, PreviewSettings(num_samples=settings.num_preview, to_text=_to_text(settings)))
    elif settings.num_preview == 0:
        remove_preview(dataset)
    card = write_card(dataset, settings.terms)
    return CardSummary(card=str(card), faults=card_faults(dataset))


def give_terms(dataset: Path, terms: CardTerms) -> None:
    """Name the license in the card: in its front matter and its table, or, where it was changed by hand, in the former.

    Raises:
        CardError: the card is missing or not valid.
        UsageError: the terms can't be; the card is as it was.
    """
    card = DatasetFolder(dataset).card
    if is_as_written(dataset):
        write_card(dataset, terms)
        return
    kept = read_kept(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else {}
    merged = merge_terms(kept, terms)
    name, link = merged.get("license_name", ""), merged.get("license_link", "")
    set_license(card, merged.get("license", ""), name=name, link=link)


def _to_text(settings: CardSettings) -> ToText | None:
    if settings.tokenizer is None:
        return None
    from .extraction.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)

    def to_text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return to_text
