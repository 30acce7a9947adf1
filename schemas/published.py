"""What of a run's records is published: all that helps a stranger, and nothing of the machine that it was made on.

run.json keeps paths, hosts and the whole command, since a run is gone on with by them; it stays at home. What
`eaglehs push` sends (manifest.json, _index/verified.json) has the form that these functions give; given it again, they
change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .manifest import Manifest
from .run import LOCAL_REVISION, EngineFacts, ModelFacts, PromptFacts

HIDDEN = "…"
"""Stands for a value that says something of one machine alone."""

_LOCAL_PATH = re.compile(r"""(^|[\s"'=,:(\[])(/|~|\.\.?/)""")
_HOST_FLAGS = frozenset({"--host", "--dist-init-addr", "--nccl-init-addr"})
_HOST_WORDS = frozenset({"HOST", "HOSTNAME", "ADDR", "ADDRESS", "IP", "USER"})
_HUB_CACHE = re.compile(r"/models--([^/]+)/snapshots/[^/]+/?$")
_NAMELESS = frozenset({"", ".", "..", "~"})


def holds_path(text: str) -> bool:
    """Tell whether a text names a file or folder of this machine, alone or among other things; an address, too."""
    return _LOCAL_PATH.search(text) is not None


def is_local(model: ModelFacts) -> bool:
    """Tell a folder from a name on the Hub; the name alone does not, `demo/model` may be either."""
    return model.revision.startswith(LOCAL_REVISION) or model.name.startswith(("/", ".", "~"))


def published_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest with model, prompts and engine as they are published."""
    return replace(
        manifest,
        model=published_model(manifest.model),
        prompts=_published_prompts(manifest.prompts),
        engine=_published_engine(manifest.engine, manifest.model),
    )


def published_model(model: ModelFacts) -> ModelFacts:
    """Return the model with a folder's own name for its path; its revision is a hash of config and weights' sizes."""
    return replace(model, name=_folder_name(model.name)) if is_local(model) else model


def _published_prompts(prompts: PromptFacts) -> PromptFacts:
    """Return the prompts with the name of a local file or folder for its path."""
    path, colon, split = prompts.source.partition(":")
    if not path.startswith(("/", "~", "./", "../")):
        return prompts
    return replace(prompts, source=path.rstrip("/").rpartition("/")[2] + colon + split)


def _published_engine(engine: EngineFacts, model: ModelFacts) -> EngineFacts:
    """Return the engine with options and variables as they were, but for paths, hosts and the folder of `model`."""
    return replace(
        engine,
        command=tuple(_published_words(engine.command, model)),
        environment={name: _published_variable(name, value) for name, value in engine.environment.items()},
    )


def _folder_name(path: str) -> str:
    cached = _HUB_CACHE.search(path)
    if cached:  # its last part is a commit, which says less than the name that stands before it
        return cached[1].rpartition("--")[2]
    parts = [part for part in path.split("/") if part not in _NAMELESS]
    return parts[-1] if parts else "model"


def _published_words(command: tuple[str, ...], model: ModelFacts) -> Iterator[str]:
    flag = ""
    for word in command:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
        elif flag:
            equals, value = "", word
        else:  # what is run: python -m sglang.launch_server
            yield word.rpartition("/")[2]
            continue
        if value and value == model.name:
            value = published_model(model).name
        elif value and (flag in _HOST_FLAGS or holds_path(value)):
            value = HIDDEN
        yield f"{flag}{equals}{value}" if word.startswith("--") else value


def _published_variable(name: str, value: str) -> str:
    is_hidden = holds_path(value) or not _HOST_WORDS.isdisjoint(name.upper().split("_"))
    return HIDDEN if is_hidden else value
