"""Reading SGLang's insides by feature: every form that a supported version has."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from eaglehs.extraction.capture_rules import RULES
from eaglehs.extraction.sglang_view import (
    CLIENTS_RULES,
    capture_layers,
    refused_settings,
    resolved_settings,
    rows_in_a_batch,
    sglang_version,
    tensor_parallel_rank,
)


@dataclass
class Phase:
    backend: str


@dataclass
class GraphConfig:
    prefill: Phase = field(default_factory=lambda: Phase("breakable"))


def forms(**settings: Any) -> list[Any]:
    """The same settings as 0.5.11, 0.5.16 and 0.5.20 or later keep them; the outer record of the last two is stale."""
    stale = {"pp_size": 1, "chunked_prefill_size": None}
    return [
        SimpleNamespace(**settings),
        SimpleNamespace(**stale, _resolved=lambda: SimpleNamespace(**settings)),
        SimpleNamespace(**stale, _resolved=lambda: None, resolved_dict=lambda: settings),
    ]


@pytest.mark.parametrize("server_args", forms(pp_size=2, chunked_prefill_size=64, model_path="secret"))
def test_settings_are_read_as_they_are_in_force(server_args: Any) -> None:
    settings = resolved_settings(server_args)
    assert settings == {"pp_size": 2, "chunked_prefill_size": 64}
    assert [violation.rule.name for violation in refused_settings(settings)] == ["pipeline parallelism"]


@pytest.mark.parametrize("server_args", forms(cuda_graph_config=GraphConfig())[:2])
def test_a_graph_config_that_is_a_record_is_read_as_well(server_args: Any) -> None:
    [violation] = refused_settings(resolved_settings(server_args))
    assert violation.rule.name == "prefill CUDA graph"


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"chunked_prefill_size": 64, "max_prefill_tokens": 16384}, 64),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 16384}, 16384),
        ({"chunked_prefill_size": None, "max_prefill_tokens": 16384}, 16384),
        ({}, None),
    ],
)
def test_a_batch_has_the_rows_of_a_chunk_or_else_of_a_prefill(settings: dict[str, Any], rows: int | None) -> None:
    assert rows_in_a_batch(settings) == rows


def test_the_rank_is_found_wherever_a_version_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_parallel_rank(SimpleNamespace(tp_rank=3)) == 3
    assert tensor_parallel_rank(SimpleNamespace(ps=SimpleNamespace(tp_rank=2))) == 2
    context = types.ModuleType("sglang.srt.runtime_context")
    context.__dict__["get_parallel"] = lambda: SimpleNamespace(tp_rank=1)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert tensor_parallel_rank(SimpleNamespace()) == 1


def test_the_rules_left_to_the_client_are_rules() -> None:
    assert {rule.name for rule in RULES} >= CLIENTS_RULES


def test_a_prefix_cache_is_the_clients_business() -> None:
    assert list(refused_settings({"disable_radix_cache": False})) == []


def test_no_sglang_is_no_error() -> None:
    assert isinstance(sglang_version(), str)


def test_layers_are_marked_both_ways_that_model_files_read() -> None:
    backbone = SimpleNamespace(layers_to_capture=[], layers=[SimpleNamespace() for _ in range(8)])
    capture_layers(backbone, (1, 4))
    assert backbone.layers_to_capture == [1, 4]
    flagged = [i for i, layer in enumerate(backbone.layers) if getattr(layer, "_is_layer_to_capture", False)]
    assert flagged == [1, 4]
