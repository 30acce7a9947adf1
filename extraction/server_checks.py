"""What a running server must be before the first prompt is sent to it: one row a check.

The evidence is what the server says of itself (`/server_info`) and what the plugin says (`capture.json` in the dump
folder). Settings that spoil capture are in `capture_rules.py`; here is the rest, and the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schemas import codec
from ..schemas.counts import counted
from ..schemas.dump import CaptureStatus
from ..schemas.errors import EngineError, RecordError
from .capture_rules import violations_in_info
from .capture_status import READY
from .model_facts import is_commit
from .sglang_versions import UNTESTED_MEND, is_supported, parse_version, supported_range

DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the run needs of the server."""

    model: str
    layers: tuple[int, ...]
    rid_prefix: str
    dump_dir: Path
    revision: str | None = None
    """The commit, or what the server should have been told; None: not compared."""

    allow_untested: bool = False
    """Take a release of SGLang that is not known to work."""

    is_bounded: bool = False
    """The client sends no more than the dump folder holds, so that it need not hold what the server could dump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was found out about a server."""

    info: Mapping[str, Any]
    status: CaptureStatus | None
    """None: there is no readable status file."""

    status_fault: str = ""
    """Why the status file can't be read."""


class ServerRefusedError(EngineError):
    """The server runs, but the states would be wrong or missing."""

    def __init__(self, check: str, what: str, *, why: str = "", mend: str = "") -> None:
        """`check` is the name of the row that failed."""
        self.check = check
        super().__init__(what, why=why, mend=mend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row: what is wrong, if anything, and how to mend it."""

    name: str
    fault: Callable[[Evidence, Expected], str]
    """Returns what is wrong, or an empty text."""

    why: str
    mend: str


def check_server(evidence: Evidence, expected: Expected) -> None:
    """Refuse a server that would capture wrong states or none.

    Raises:
        ServerRefusedError: the first check that failed.
    """
    for refusal in refusals(evidence, expected):
        raise refusal


def refusals(evidence: Evidence, expected: Expected) -> Iterator[ServerRefusedError]:
    """Yield everything that is wrong with a server."""
    for violation in violations_in_info(evidence.info):
        yield ServerRefusedError(
            violation.rule.name,
            f"the server runs with {violation.found} ({violation.rule.name})",
            why=violation.rule.why,
            mend=violation.rule.mend,
        )
    for check in CHECKS:
        if fault := check.fault(evidence, expected):
            yield ServerRefusedError(check.name, fault, why=check.why, mend=check.mend)


def read_status(dump_dir: Path) -> tuple[CaptureStatus | None, str]:
    """Return the plugin's status file, or None and why it can't be read (empty: there is none)."""
    path = dump_dir / CaptureStatus.FILENAME
    if not path.exists():
        return None, ""
    try:
        return codec.read_record(CaptureStatus, path), ""
    except RecordError as fault:
        return None, str(fault)


def num_replicas(info: Mapping[str, Any]) -> int:
    """Return how many processes (groups of them, with tensor parallelism) compute prompts of their own."""
    return _size(info, "dp_size")


def num_nodes(info: Mapping[str, Any]) -> int:
    """Return on how many machines the server runs."""
    return _size(info, "nnodes")


def _size(info: Mapping[str, Any], name: str) -> int:
    size = info.get(name)
    return size if isinstance(size, int) and size > 1 else 1


def _version_fault(evidence: Evidence, expected: Expected) -> str:
    version = str(evidence.info.get("version", "unknown"))
    is_fine = expected.allow_untested or is_supported(parse_version(version))
    return "" if is_fine else f"the server is SGLang {version}, expected {supported_range()}"


def _model_fault(evidence: Evidence, expected: Expected) -> str:
    found = str(evidence.info.get("model_path"))
    return (
        "" if _is_same_model(found, expected.model) else f"the server runs the model {found}, expected {expected.model}"
    )


def _is_same_model(found: str, wanted: str) -> bool:
    if found.rstrip("/") == wanted.rstrip("/"):
        return True
    return Path(found).exists() and Path(wanted).exists() and Path(found).samefile(wanted)


def _revision_fault(evidence: Evidence, expected: Expected) -> str:
    found = evidence.info.get("revision")
    if found is None or expected.revision is None:
        return ""
    tells_commit = is_commit(str(found)) or not is_commit(expected.revision)  # the name of a branch does not
    is_other = tells_commit and found != expected.revision
    return f"the server runs revision {found} of {expected.model}, expected {expected.revision}" if is_other else ""


def _missing_fault(evidence: Evidence, expected: Expected) -> str:
    if evidence.status is not None or evidence.status_fault:
        return ""
    nodes = num_nodes(evidence.info)
    where = (
        f"; the server runs on {counted(nodes, 'node')}, and its rank 0 writes there, on its own node"
        if nodes > 1
        else ""
    )
    return f"the plugin is not loaded in that server: {expected.dump_dir} has no {CaptureStatus.FILENAME}{where}"


def _scattered_fault(evidence: Evidence, _: Expected) -> str:
    nodes, replicas = num_nodes(evidence.info), num_replicas(evidence.info)
    is_scattered = nodes > 1 and replicas > 1
    return (
        f"the server's {counted(replicas, 'replica')} (dp_size) run on {counted(nodes, 'node')}" if is_scattered else ""
    )


def _unreadable_fault(evidence: Evidence, _: Expected) -> str:
    return f"the plugin's status can't be read: {evidence.status_fault}" if evidence.status_fault else ""


def _failed_fault(evidence: Evidence, _: Expected) -> str:
    status = evidence.status
    return f"capture has failed in the server: {status.message}" if status and status.state != READY else ""


def _layers_fault(evidence: Evidence, expected: Expected) -> str:
    status = evidence.status
    if status is None or status.layers == tuple(sorted(expected.layers)):
        return ""
    return f"the server captures layers {_listed(status.layers)}, expected {_listed(expected.layers)}"


def _dtype_fault(evidence: Evidence, _: Expected) -> str:
    status = evidence.status
    is_other = status is not None and status.dtype.removeprefix("torch.") != DTYPE
    return f"the server computes in {status.dtype}, expected {DTYPE}" if status and is_other else ""


def _prefix_fault(evidence: Evidence, expected: Expected) -> str:
    status = evidence.status
    if status is None or expected.rid_prefix.startswith(status.rid_prefix):
        return ""
    return f"the server captures requests {status.rid_prefix}* only, this run's are {expected.rid_prefix}*"


def _listed(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


CHECKS: tuple[Check, ...] = (
    Check(
        name="version",
        fault=_version_fault,
        why="The capture relies on names inside SGLang that other versions may not have",
        mend=f"Install such a version, or an eaglehs that knows this one, {UNTESTED_MEND}",
    ),
    Check(
        name="model",
        fault=_model_fault,
        why="The states of another model would be stored under this one's name",
        mend="Give --model as the server has it, or the address of another server",
    ),
    Check(
        name="revision",
        fault=_revision_fault,
        why="The states of other weights would be stored under this revision",
        mend="Give --revision as the server has it, or start the server with this one",
    ),
    Check(
        name="plugin missing",
        fault=_missing_fault,
        why="The server would answer, but dump nothing. Or it dumps into another folder than --dump-dir names",
        mend="Start it with `eaglehs serve`, or install eaglehs into its environment and set SGLANG_HS_DUMP_DIR",
    ),
    Check(
        name="replicas on several nodes",
        fault=_scattered_fault,
        why="Each replica writes its dumps on its own node, and eaglehs reads one folder",
        mend="Start a server on each node and give each with --server URL=DUMPDIR, or use --tp-size over the nodes",
    ),
    Check(
        name="status unreadable",
        fault=_unreadable_fault,
        why="Another version of eaglehs may have written it",
        mend="Install the same eaglehs in the server's environment and start it again",
    ),
    Check(
        name="capture failed",
        fault=_failed_fault,
        why="It goes on serving, but dumps nothing",
        mend="Mend the cause, see the server's log, and start it again",
    ),
    Check(
        name="layers",
        fault=_layers_fault,
        why="A dataset has one list of layers",
        mend="Give --layers as the server has them, or start the server with these",
    ),
    Check(
        name="dtype",
        fault=_dtype_fault,
        why="Dumps hold bfloat16, bit for bit",
        mend="Use the bfloat16 weights of the model, and no --dtype",
    ),
    Check(
        name="request ids",
        fault=_prefix_fault,
        why="Its requests would be answered and not dumped",
        mend="Start the server with `eaglehs serve`, which captures any run's requests",
    ),
)
