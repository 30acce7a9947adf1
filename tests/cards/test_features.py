"""The front matter is what `datasets` understands, whatever the names in it."""

from dataclasses import replace

import pytest
import yaml
from datasets import Array2D, Features
from eaglehs.cards.facts import card_facts
from eaglehs.cards.features import front_matter, read_kept
from eaglehs.cards.render import CardExtras, render_card
from eaglehs.schemas.manifest import Manifest

from tests.factories.manifests import make_manifest


def head_of(manifest: Manifest) -> dict:
    return yaml.safe_load(front_matter(manifest, card_facts(manifest), {}))


def test_datasets_reads_the_declared_columns_as_typed_arrays():
    features = Features._from_yaml_list(head_of(make_manifest())["dataset_info"]["features"])
    assert features["input_ids.npy"] == Array2D((None, 1), "int32")
    assert features["loss_mask.npy"] == Array2D((None, 1), "uint8")
    assert features["layer_31.bf16.npy"] == Array2D((None, 16), "uint16")
    assert features["final.bf16.npy"] == Array2D((None, 16), "uint16")
    assert features["meta.json"]["num_tokens"].dtype == "int64"
    assert features["__key__"].dtype == features["__url__"].dtype == "string"


def test_the_one_config_names_the_shards_alone_and_the_viewer_is_off():
    head = head_of(make_manifest())
    assert head["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.tar"}]}
    ]
    assert head["viewer"] is False


def test_the_split_has_its_counts():
    info = head_of(make_manifest())["dataset_info"]
    assert info["splits"] == [{"name": "train", "num_bytes": 42 * 133, "num_examples": 3}]


@pytest.mark.parametrize(
    "name",
    [
        'org: "model"',
        "it's",
        "- dash",
        "#hash: x",
        "line\nend\n---\n",
        "{{ 7 * 7 }}",
        "a|b`c`*d*<script>",
        "ünïcode 🦅",
        "yes",
        "bad\udcffbyte",
    ],
)
def test_a_hostile_name_is_one_string_in_valid_yaml(name: str):
    manifest = make_manifest(model=replace(make_manifest().model, name=name))
    card = render_card(manifest)
    assert card.startswith("---\n")
    assert len(yaml.safe_load(card.split("\n---\n")[0])["dataset_info"]["features"]) == 9
    assert card.encode()
    if "\udcff" not in name:
        assert head_of(manifest)["pretty_name"] == f"EAGLE-3 hidden states of {name}"


def test_a_publishers_license_is_kept_and_all_else_is_made_anew():
    card = render_card(make_manifest())
    licensed = card.replace("---\n", "---\nlicense: other\nlicense_name: mine\nextra: gone\n", 1)
    kept = read_kept(licensed)
    assert kept == {"license": "other", "license_name": "mine"}
    again = render_card(make_manifest(), CardExtras(kept=kept))
    assert again.startswith("---\nlicense: other\nlicense_name: mine\npretty_name:")
    assert "the publisher gives it here" not in again


@pytest.mark.parametrize(
    "card", ["", "# no head\n", "---\n: : :\n---\n", "---\n- a\n---\n", "---\nlicense: [1]\n---\n"]
)
def test_a_card_without_a_readable_license_keeps_nothing(card: str):
    assert read_kept(card) == {}
