"""Terms are the publisher's: kept from card to card, replaced as a whole, refused where the Hub would."""

import pytest
from eaglehs.cards.licenses import LICENSE_IDS, CardTerms, license_faults, merge_terms
from eaglehs.schemas.errors import UsageError


def test_new_terms_win_and_the_others_stay():
    kept = {"license": "mit", "model_terms": "MIT", "prompts_terms": "cc0-1.0"}
    assert merge_terms(kept, CardTerms(model_terms="Modified MIT")) == kept | {"model_terms": "Modified MIT"}
    assert merge_terms(kept, CardTerms()) == kept


def test_another_license_does_not_keep_the_name_of_the_one_before():
    kept = {"license": "other", "license_name": "acme", "license_link": "https://example.org"}
    assert merge_terms(kept, CardTerms(license="mit")) == {"license": "mit"}
    assert merge_terms(kept, CardTerms(license_link="https://example.com"))["license_name"] == "acme"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (CardTerms(license="MIT"), "'MIT' is no license id"),
        (CardTerms(license="other"), "--license-name"),
        (CardTerms(license_name="acme"), "without --license other"),
    ],
)
def test_terms_that_the_hub_would_refuse_are_refused(terms: CardTerms, message: str):
    with pytest.raises(UsageError, match=message):
        merge_terms({}, terms)


def test_a_card_that_somebody_wrote_is_not_refused_for_terms_that_were_not_asked_about():
    assert merge_terms({"license": "my own"}, CardTerms()) == {"license": "my own"}


def test_the_ids_are_the_hubs_form():
    assert {"apache-2.0", "mit", "cc-by-4.0", "other"} <= LICENSE_IDS
    assert all(name == name.lower() and " " not in name for name in LICENSE_IDS)
    assert license_faults({"license": "cc-by-4.0"}) == ()
