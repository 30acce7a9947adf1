"""What is published helps a stranger and tells nothing of the machine that it was made on."""

from dataclasses import replace

import pytest
from eaglehs.schemas.codec import dumps
from eaglehs.schemas.manifest import Manifest
from eaglehs.schemas.published import published_manifest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.manifests import make_manifest

LOCAL = "local-0123456789abcdef"


def of_model(name: str, revision: str = LOCAL) -> Manifest:
    return make_manifest(model=replace(make_manifest().model, name=name, revision=revision))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("/home/alice/models/tiny-kimi/", "tiny-kimi"),
        ("~/tiny-kimi", "tiny-kimi"),
        ("work/tiny-kimi", "tiny-kimi"),
        ("../tiny-kimi/.", "tiny-kimi"),
        ("/home/alice/.cache/huggingface/hub/models--moonshotai--Kimi-K2.5/snapshots/" + "0" * 40, "Kimi-K2.5"),
        (".", "model"),
    ],
)
def test_of_a_local_model_the_folders_name_and_the_hash_are_told(name: str, told: str):
    model = published_manifest(of_model(name)).model
    assert (model.name, model.revision) == (told, LOCAL)


def test_a_model_of_the_hub_is_told_whole():
    manifest = of_model("moonshotai/Kimi-K2.5", "0" * 40)
    assert published_manifest(manifest).model == manifest.model


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("/home/alice/prompts.jsonl", "prompts.jsonl"),
        ("/home/alice/prompts/:en:test", "prompts:en:test"),
        ("hf://datasets/org/name:test", "hf://datasets/org/name:test"),
        ("org/name:en:test", "org/name:en:test"),
    ],
)
def test_of_prompts_the_files_or_datasets_name_is_told(source: str, told: str):
    manifest = make_manifest(prompts=replace(make_manifest().prompts, source=source))
    assert published_manifest(manifest).prompts.source == told


def test_the_servers_options_are_told_without_paths_and_hosts():
    command = (
        *("/home/alice/venv/bin/python3", "-m", "sglang.launch_server", "--model-path", "/home/alice/tiny"),
        *("--host", "gpu7.example.org", "--dist-init-addr=10.0.0.7:5000", "--tp-size", "8", "--disable-radix-cache"),
        *("--json-model-override-args", '{"path": "/home/alice"}', "--chat-template=/home/alice/t.jinja"),
    )
    environment = {"SGLANG_HS_DUMP_DIR": "/dev/shm/alice", "SGLANG_HS_LAYERS": "1,2", "MASTER_ADDR": "gpu7"}
    engine = replace(make_manifest().engine, command=command, environment=environment)
    told = published_manifest(replace(of_model("/home/alice/tiny"), engine=engine)).engine
    assert told.command == (
        *("python3", "-m", "sglang.launch_server", "--model-path", "tiny"),
        *("--host", "…", "--dist-init-addr=…", "--tp-size", "8", "--disable-radix-cache"),
        *("--json-model-override-args", "…", "--chat-template=…"),
    )
    assert told.environment == {"SGLANG_HS_DUMP_DIR": "…", "SGLANG_HS_LAYERS": "1,2", "MASTER_ADDR": "…"}
    assert told.versions == engine.versions


WORDS = st.lists(st.sampled_from(["--host", "a", "-m", "--x=/y", "--model-path", "/h/m", "m", "--u", "http://h/"]))
NAMES = st.text(st.sampled_from("/.~ab-:"), max_size=12)


@given(name=NAMES, source=NAMES, words=WORDS, revision=st.sampled_from([LOCAL, "0" * 40]))
def test_what_is_published_stays_as_it_is(name: str, source: str, words: list[str], revision: str):
    """`push` refuses what is not in this form, so it must be reached at once."""
    manifest = of_model(name, revision)
    manifest = replace(
        manifest,
        prompts=replace(manifest.prompts, source=source),
        engine=replace(manifest.engine, command=tuple(words)),
    )
    told = published_manifest(manifest)
    assert published_manifest(told) == told
    assert "/h/m" not in dumps(told.engine)
