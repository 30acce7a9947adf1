"""Every check of a running server and every rule about its settings, one case a row."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from eaglehs.extraction.capture_rules import RULES, violations_in_arguments, violations_in_info
from eaglehs.extraction.server_checks import (
    CHECKS,
    Evidence,
    Expected,
    ServerRefusedError,
    check_server,
    read_status,
    refusals,
)
from eaglehs.schemas.codec import write_record
from eaglehs.schemas.dump import CaptureStatus

STATUS = CaptureStatus(
    state="ready",
    message="",
    pid=1,
    model_class="DeepseekV3ForCausalLM",
    layers=(3, 31, 59),
    num_layers=61,
    hidden_size=7168,
    dtype="bfloat16",
    rid_prefix="eh-",
    engine_version="0.5.23",
    plugin_version="0.1.0",
)
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "org/model",
    "revision": "main",
    "disable_radix_cache": True,
    "speculative_algorithm": None,
    "pp_size": 1,
    "attn_dp_size": 1,
    "dp_size": 1,
    "tp_size": 8,
    "moe_a2a_backend": "none",
    "enable_flashinfer_allreduce_fusion": False,
    "flashinfer_allreduce_fusion_backend": None,
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "disaggregation_mode": "null",
    "dtype": "auto",
    "cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}},
    "enable_mixed_chunk": True,
}
EXPECTED = Expected(
    model="org/model", layers=(3, 31, 59), rid_prefix="eh-run1-", dump_dir=Path("/dumps"), revision="main"
)

WRONG_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("prefix cache", {"disable_radix_cache": False}),
    ("cache across requests", {"enable_hierarchical_cache": True}),
    ("speculative decoding", {"speculative_algorithm": "EAGLE3"}),
    ("pipeline parallelism", {"pp_size": 2}),
    ("data-parallel attention", {"enable_dp_attention": True}),
    ("data-parallel attention", {"attn_dp_size": 8}),
    ("context parallelism", {"attn_cp_size": 2}),
    ("context parallelism", {"moe_dp_size": 2}),
    ("context parallelism", {"dcp_size": 2}),
    ("context parallelism", {"enable_prefill_cp": True}),
    ("scattered rows", {"enable_layernorm_sp": True}),
    ("fused all-reduce", {"enable_flashinfer_allreduce_fusion": True}),
    ("fused all-reduce", {"flashinfer_allreduce_fusion_backend": "auto"}),
    ("fused all-reduce", {"enable_aiter_allreduce_fusion": True}),
    ("all-to-all experts", {"moe_a2a_backend": "deepep"}),
    ("prefill CUDA graph", {"cuda_graph_config": {"prefill": {"backend": "breakable"}}}),
    ("prefill CUDA graph", {"cuda_graph_backend_prefill": "full"}),
    ("forced piecewise CUDA graph", {"enforce_piecewise_cuda_graph": True}),
    ("piecewise CUDA graph", {"disable_piecewise_cuda_graph": False}),
    ("two-batch overlap", {"enable_two_batch_overlap": True}),
    ("prefill/decode multiplexing", {"enable_pdmux": True}),
    ("disaggregated serving", {"disaggregation_mode": "prefill"}),
    ("diffusion decoding", {"dllm_algorithm": "LowConfidence"}),
    ("embedding mode", {"is_embedding": True}),
    ("silent truncation", {"allow_auto_truncate": True}),
    ("other dtype", {"dtype": "float16"}),
]

WRONG_EVIDENCE: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [
    ("version", {"version": "0.4.9"}, {}, r"SGLang 0\.4\.9, expected 0\.5\.11 to 0\.5\.23\..*--allow-untested"),
    ("version", {"version": "0.6.0"}, {}, r"SGLang 0\.6\.0"),
    ("model", {"model_path": "other/model"}, {}, "runs the model other/model, expected org/model"),
    ("revision", {"revision": "abc"}, {}, "runs revision abc of org/model, expected main"),
    ("plugin missing", {}, None, "plugin is not loaded in that server: /dumps has no capture.json.*`eaglehs serve`"),
    ("plugin missing", {"nnodes": 2}, None, r"no capture.json; the server runs on 2 nodes, and its rank 0"),
    ("replicas on several nodes", {"nnodes": 2, "dp_size": 4}, {}, r"4 replicas \(dp_size\) run on 2 nodes"),
    ("capture failed", {}, {"state": "failed", "message": "no layers_to_capture"}, "has failed.*no layers_to_capture"),
    ("layers", {}, {"layers": (2, 30, 58)}, "captures layers 2,30,58, expected 3,31,59"),
    ("dtype", {}, {"dtype": "torch.float16"}, r"computes in torch\.float16, expected bfloat16"),
    ("request ids", {}, {"rid_prefix": "eh-run2-"}, r"captures requests eh-run2-\* only, this run's are eh-run1-\*"),
]

WRONG_ARGUMENTS: list[tuple[str, list[str]]] = [
    ("speculative decoding", ["--speculative-algorithm", "EAGLE3"]),
    ("speculative decoding", ["--speculative-algo=NGRAM"]),
    ("pipeline parallelism", ["--tp-size", "4", "--pp-size", "2"]),
    ("pipeline parallelism", ["--pipeline-parallel-size=2"]),
    ("data-parallel attention", ["--enable-dp-attention"]),
    ("data-parallel attention", ["--attn-dp-size", "2"]),
    ("cache across requests", ["--enable-hicache"]),
    ("context parallelism", ["--moe-dp-size", "2"]),
    ("context parallelism", ["--moe-data-parallel-size=2"]),
    ("prefill CUDA graph", ["--cuda-graph-backend-prefill", "breakable"]),
    ("prefill CUDA graph", ["--cuda-graph-config", '{"prefill": {"backend": "full"}}']),
    ("forced piecewise CUDA graph", ["--enforce-piecewise-cuda-graph"]),
    ("two-batch overlap", ["--enable-two-batch-overlap"]),
    ("fused all-reduce", ["--enable-flashinfer-allreduce-fusion"]),
    ("fused all-reduce", ["--flashinfer-allreduce-fusion-backend", "trtllm"]),
    ("other dtype", ["--dtype", "float16"]),
]

GOOD_ARGUMENTS = [
    ["--tp-size", "8", "--mem-fraction-static", "0.85", "--disable-radix-cache"],
    ["--pp-size", "1", "--dp-size=1", "--enable-mixed-chunk"],
    ["--dp-size", "4", "--tp-size", "2"],
    ["--enforce-disable-flashinfer-allreduce-fusion"],
    ["--cuda-graph-config", '{"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}}'],
    ["--disable-cuda-graph", "--disable-piecewise-cuda-graph", "--dtype", "bfloat16"],
    ["--speculative-algorithm", "none"],
    ["--context-length", "4096", "--chunked-prefill-size", "64"],
]


def make_evidence(info: dict[str, Any] | None = None, status: dict[str, Any] | None = None) -> Evidence:
    return Evidence(info=INFO | (info or {}), status=dataclasses.replace(STATUS, **(status or {})))


def test_a_server_as_eaglehs_starts_it_passes():
    check_server(make_evidence(), EXPECTED)


@pytest.mark.parametrize(("rule", "info"), WRONG_SETTINGS)
def test_a_setting_that_spoils_capture_is_refused_with_reason_and_mend(rule: str, info: dict[str, Any]):
    (refusal,) = refusals(make_evidence(info), EXPECTED)
    assert refusal.check == rule
    assert next(iter(info)) in refusal.what
    assert refusal.why
    assert refusal.mend


def test_every_rule_about_settings_has_a_case():
    assert {rule.name for rule in RULES} == {name for name, _ in WRONG_SETTINGS}


@pytest.mark.parametrize(("check", "info", "status", "message"), WRONG_EVIDENCE)
def test_what_the_run_does_not_expect_is_refused(
    check: str, info: dict[str, Any], status: dict[str, Any] | None, message: str
):
    evidence = make_evidence(info, status)
    if status is None:
        evidence = dataclasses.replace(evidence, status=None)
    with pytest.raises(ServerRefusedError, match=message) as caught:
        check_server(evidence, EXPECTED)
    assert caught.value.check == check
    assert caught.value.mend


def test_a_status_that_can_not_be_read_is_refused_with_its_fault(tmp_path: Path):
    (tmp_path / "capture.json").write_text("{")
    status, fault = read_status(tmp_path)
    with pytest.raises(ServerRefusedError, match=r"status can't be read.*not valid JSON") as caught:
        check_server(Evidence(info=INFO, status=status, status_fault=fault), EXPECTED)
    assert caught.value.check == "status unreadable"


def test_every_check_has_a_case():
    assert {check.name for check in CHECKS} == {name for name, *_ in WRONG_EVIDENCE} | {"status unreadable"}


def test_a_status_is_read_as_it_was_written(tmp_path: Path):
    assert read_status(tmp_path) == (None, "")
    write_record(tmp_path / "capture.json", STATUS)
    assert read_status(tmp_path) == (STATUS, "")


def test_a_server_that_does_not_tell_about_its_prefix_cache_is_refused():
    info = {name: value for name, value in INFO.items() if name != "disable_radix_cache"}
    (violation,) = violations_in_info(info)
    assert violation.found == "disable_radix_cache is not reported"


def test_settings_that_a_version_does_not_have_are_not_missed():
    assert not list(violations_in_info({"disable_radix_cache": True}))


def test_layers_in_another_order_are_the_same_layers():
    check_server(make_evidence(), dataclasses.replace(EXPECTED, layers=(59, 3, 31)))


def test_a_revision_that_nobody_named_is_not_compared():
    check_server(make_evidence({"revision": None}), EXPECTED)
    check_server(make_evidence({"revision": "abc"}), dataclasses.replace(EXPECTED, revision=None))


def test_a_commit_is_held_against_a_commit_and_not_against_the_name_of_a_branch():
    ours, other = "a" * 40, "b" * 40
    expected = dataclasses.replace(EXPECTED, revision=ours)
    check_server(make_evidence({"revision": ours}), expected)
    check_server(make_evidence({"revision": "main"}), expected)
    with pytest.raises(ServerRefusedError, match=f"runs revision {other} of org/model, expected {ours}"):
        check_server(make_evidence({"revision": other}), expected)


def test_one_folder_under_two_names_is_one_model(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    expected = dataclasses.replace(EXPECTED, model=str(tmp_path / "link"))
    check_server(make_evidence({"model_path": f"{tmp_path}/model/"}), expected)


@pytest.mark.parametrize(("rule", "arguments"), WRONG_ARGUMENTS)
def test_an_argument_that_spoils_capture_is_found(rule: str, arguments: list[str]):
    (violation,) = violations_in_arguments(arguments)
    assert violation.rule.name == rule


@pytest.mark.parametrize("arguments", GOOD_ARGUMENTS)
def test_arguments_that_do_no_harm_pass(arguments: list[str]):
    assert not list(violations_in_arguments(arguments))


def test_a_release_that_is_not_known_passes_where_the_user_says_so():
    check_server(make_evidence({"version": "0.7.0"}), dataclasses.replace(EXPECTED, allow_untested=True))
