"""SGLang settings under which capture would lose, mix or change rows: one table, used before and after the start.

`server_command.py` reads it against the user's own SGLang arguments, `server_checks.py` against what the running
server says of itself, which is what counts: SGLang resolves several settings after it has parsed them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..schemas.json_text import parse_json

Setting = object
"""A value as SGLang's command line (str, or True for a bare flag) or /server_info (JSON) gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that the server must not do."""

    name: str
    settings: tuple[str, ...]
    """Fields of SGLang's ServerArgs; each is also the flag `--<name with dashes>`."""

    is_wrong: Callable[[Setting], bool]
    why: str
    mend: str
    aliases: tuple[str, ...] = ()
    """Other spellings of the flags."""

    must_be_told: bool = False
    """A server that does not report the (first) setting is refused as well."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that set it."""
        return (*(f"--{setting.replace('_', '-')}" for setting in self.settings), *self.aliases)


def is_on(value: Setting) -> bool:
    """Tell whether a switch is on."""
    return value is True


def is_chosen(value: Setting) -> bool:
    """Tell whether a choice is anything but none."""
    return value is not None and str(value).lower() not in {"", "none", "null"}


def is_many(value: Setting) -> bool:
    """Tell whether a size is above one; what is no number counts as one, SGLang itself refuses it."""
    return str(value).isdecimal() and int(str(value)) > 1


def is_graph(value: Setting) -> bool:
    """Tell whether a prefill backend, or the prefill part of a `cuda_graph_config`, is a graph."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = parse_json(value)
        except ValueError:
            return False
    if isinstance(value, Mapping):
        prefill = value.get("prefill")
        value = prefill.get("backend") if isinstance(prefill, Mapping) else None
    return is_chosen(value) and value != "disabled"


def is_fused(value: Setting) -> bool:
    """Tell whether a switch of the fused all-reduce is on, or its backend chosen."""
    return is_on(value) or (isinstance(value, str) and is_chosen(value))


def is_other_dtype(value: Setting) -> bool:
    """Tell whether a dtype is given that is not bfloat16."""
    return is_chosen(value) and str(value) not in {"auto", "bfloat16"}


_SCATTERED = "Each rank then holds other rows, or rows in another order, and rank 0 would write only its own"
_CACHED = "Tokens that the cache has already seen are never computed, so their rows would be missing"
_REPLAYED = "A replayed graph hides the request ids and pads the rows"
_TP_ALONE = "Use --tp-size alone"
_LEAVE_OUT = "Leave the argument out"

RULES: tuple[Rule, ...] = (
    Rule(
        name="prefix cache",
        settings=("disable_radix_cache",),
        is_wrong=lambda value: value is not True,
        why=_CACHED,
        mend="Start the server with --disable-radix-cache, or with `eaglehs serve`",
        must_be_told=True,
    ),
    Rule(
        name="cache across requests",
        settings=("enable_hierarchical_cache", "enable_session_radix_cache", "enable_lmcache", "enable_flexkv"),
        aliases=("--enable-hicache",),
        is_wrong=is_on,
        why=_CACHED,
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="speculative decoding",
        settings=("speculative_algorithm",),
        is_wrong=is_chosen,
        why="A drafter's forward passes would mix with the target model's, and it wants the same capture points",
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="pipeline parallelism",
        settings=("pp_size",),
        aliases=("--pipeline-parallel-size",),
        is_wrong=is_many,
        why="Only the last stage could be captured; the states of layers on earlier stages would be lost",
        mend=_TP_ALONE,
    ),
    Rule(
        name="data-parallel attention",
        settings=("enable_dp_attention", "attn_dp_size"),
        aliases=("--attention-data-parallel-size",),
        is_wrong=lambda value: is_on(value) or is_many(value),
        why=_SCATTERED,
        mend=_TP_ALONE,
    ),
    Rule(
        name="context parallelism",
        settings=(
            "attn_cp_size",
            "moe_dp_size",  # experts in groups of their own, which SGLang has for context parallelism
            "dcp_size",
            "enable_prefill_cp",
            "enable_prefill_context_parallel",
            "enable_nsa_prefill_context_parallel",
            "enable_dsa_prefill_context_parallel",
        ),
        aliases=(
            "--attention-context-parallel-size",
            "--moe-data-parallel-size",
            "--decode-context-parallel-size",
        ),
        is_wrong=lambda value: is_on(value) or is_many(value),
        why=_SCATTERED,
        mend=_TP_ALONE,
    ),
    Rule(
        name="scattered rows",
        settings=("enable_attn_tp_input_scattered", "enable_layernorm_sp"),
        is_wrong=is_on,
        why=_SCATTERED,
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="fused all-reduce",
        settings=(
            "enable_flashinfer_allreduce_fusion",
            "flashinfer_allreduce_fusion_backend",
            "enable_aiter_allreduce_fusion",
        ),
        is_wrong=is_fused,
        why="A layer's sum over the ranks is then left to the next layer, and between them, where states are captured, "
        "each rank holds a part of it (sgl-project/sglang#28343)",
        mend="Start the server with --enforce-disable-flashinfer-allreduce-fusion, and without the switches for it",
    ),
    Rule(
        name="all-to-all experts",
        settings=("moe_a2a_backend",),
        is_wrong=is_chosen,
        why=_SCATTERED,
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="prefill CUDA graph",
        settings=("cuda_graph_config", "cuda_graph_backend_prefill"),
        is_wrong=is_graph,
        why=_REPLAYED,
        mend="Start the server with --cuda-graph-backend-prefill disabled",
    ),
    Rule(
        name="forced piecewise CUDA graph",
        settings=("enforce_piecewise_cuda_graph", "enable_piecewise_cuda_graph"),
        is_wrong=is_on,
        why=_REPLAYED,
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="piecewise CUDA graph",
        settings=("disable_piecewise_cuda_graph",),  # SGLang before 0.5.14; on unless told otherwise
        is_wrong=lambda value: value is False,
        why=_REPLAYED,
        mend="Start the server with --disable-piecewise-cuda-graph",
    ),
    Rule(
        name="two-batch overlap",
        settings=("enable_two_batch_overlap",),
        is_wrong=is_on,
        why="Layers that run as two overlapping half batches are not captured",
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="prefill/decode multiplexing",
        settings=("enable_pdmux",),
        is_wrong=is_on,
        why="A prefill that is split between layers is not captured",
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="disaggregated serving",
        settings=("disaggregation_mode",),
        is_wrong=is_chosen,
        why="Prefill and decode then run in servers of their own, and states came out in wrong shapes",
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="diffusion decoding",
        settings=("dllm_algorithm",),
        is_wrong=is_chosen,
        why="A token's state then depends on tokens that follow it",
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="embedding mode",
        settings=("is_embedding",),
        is_wrong=is_on,
        why="The server then answers with embeddings and not with the next token",
        mend=_LEAVE_OUT,
    ),
    Rule(
        name="silent truncation",
        settings=("allow_auto_truncate",),
        is_wrong=is_on,
        why="Prompts above the context length would be cut without a word",
        mend="Leave the argument out and cut prompts with --max-tokens",
    ),
    Rule(
        name="other dtype",
        settings=("dtype",),
        is_wrong=is_other_dtype,
        why="Dumps hold bfloat16, bit for bit",
        mend=_LEAVE_OUT,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A setting that a rule forbids, and where it was found."""

    rule: Rule
    found: str
    """As the user would write it: `--pp-size 2`, or `pp_size = 2`."""


def violations_in_arguments(arguments: Sequence[str]) -> Iterator[Violation]:
    """Yield what the rules forbid in SGLang arguments. Abbreviated flags are seen too: argparse takes them."""
    for flag, value in parse_arguments(arguments):
        for rule in RULES:
            if any(_means(flag, known) for known in rule.flags) and rule.is_wrong(value):
                shown = flag if value is True else f"{flag} {value}"
                yield Violation(rule=rule, found=shown)


def violations_in_info(info: Mapping[str, Setting]) -> Iterator[Violation]:
    """Yield what the rules forbid in the settings that a running server reports of itself."""
    for rule in RULES:
        for setting in rule.settings:
            if setting in info and rule.is_wrong(info[setting]):
                yield Violation(rule=rule, found=f"{setting} = {json.dumps(info[setting], default=str)[:120]}")
        if rule.must_be_told and rule.settings[0] not in info:
            yield Violation(rule=rule, found=f"{rule.settings[0]} is not reported")


def parse_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str | bool]]:
    """Yield (flag, value) pairs of a command line, with True for a flag without value."""
    for position, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        flag, has_value, value = argument.partition("=")
        following = arguments[position + 1] if position + 1 < len(arguments) else "--"
        if has_value:
            yield flag, value
        else:
            yield flag, True if following.startswith("--") else following


def _means(flag: str, known: str) -> bool:
    # `--speculative-algo` is --speculative-algorithm to argparse; two letters are not enough to mean anything
    return flag == known or (len(flag) >= len("--abcd") and known.startswith(flag))
