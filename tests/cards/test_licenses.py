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
        (CardTerms(license="other", license_name="Modified MIT"), "'Modified MIT' has not .* such as modified-mit"),
        (CardTerms(license="other", license_name="acme: 2"), "such as acme-2"),
        (CardTerms(license="other", license_name="-"), "such as my-license-1.0"),
    ],
)
def test_terms_that_the_hub_would_refuse_are_refused(terms: CardTerms, message: str):
    with pytest.raises(UsageError, match=message):
        merge_terms({}, terms)


@pytest.mark.parametrize("name", ["modified-mit", "my-license-1.0", "flux_1.dev"])
def test_a_name_in_the_form_of_an_id_is_taken(name: str):
    assert merge_terms({}, CardTerms(license="other", license_name=name))["license_name"] == name


def test_a_name_in_words_that_a_card_has_already_does_not_stop_what_is_said_of_other_terms():
    kept = {"license": "other", "license_name": "Modified MIT"}
    assert merge_terms(kept, CardTerms(model_terms="MIT")) == kept | {"model_terms": "MIT"}


def test_a_card_that_somebody_wrote_is_not_refused_for_terms_that_were_not_asked_about():
    assert merge_terms({"license": "my own"}, CardTerms()) == {"license": "my own"}


def test_the_ids_are_the_hubs_form():
    assert {"apache-2.0", "mit", "cc-by-4.0", "other"} <= LICENSE_IDS
    assert all(name == name.lower() and " " not in name for name in LICENSE_IDS)
    assert license_faults({"license": "cc-by-4.0"}) == ()
