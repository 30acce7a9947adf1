"""A fake SGLang server for faults that the real one can't be made to show. It proves nothing about SGLang itself.

It answers `/generate` and `/server_info` as SGLang does and writes real dumps (extraction/sink.py) of made-up states.
`Faults` says what goes wrong; in a process of its own they come as JSON in the variable EAGLEHS_FAKE_FAULTS:

    FakeSglang(FakeSettings(...), Faults(short_rows=3)).start()      in the test's own process, for the engine
    python -m sglang.launch_server ...                               as ManagedServer starts it, with `fake_site` on
                                                                     PYTHONPATH standing in for the real package
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eaglehs.extraction import capture_settings
from eaglehs.schemas import codec
from eaglehs.schemas.dump import CaptureStatus, DumpName

ROOT = Path(__file__).parent.parent.parent
HIDDEN = 8
CHUNK = 64
VERSION = "0.5.23"
FAULTS_VARIABLE = "EAGLEHS_FAKE_FAULTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong; the trial request and those of other prefixes are spared unless a fault is one of the start."""

    is_silent: bool = False
    """Binds and never answers."""

    unready_times: int = 0
    """Answers 503 so many times first."""

    dies_after_s: float = 0.0
    """Prints a line, and exits with code 1 after so long."""

    forks: str = ""
    """`child`: starts a process that sleeps for an hour. `daemon`: the same in a session of its own."""

    ignores_term: bool = False
    reverse_after: int = 0
    """Holds answers and dumps back until so many requests are there, then serves the last first."""

    dump_delay_s: float = 0.0
    """Answers at once and dumps so much later."""

    short_rows: int = 0
    """The first rows that are left out of the dumps."""

    cached_tokens: int = 0
    """Told in the answer, and left out of the dumps."""

    is_doubled: bool = False
    """Dumps an overlapping range as well."""

    decode_rows: int = 0
    """Dumps so many one-row files of positions after the prompt as well."""

    no_dumps: bool = False
    no_trial_dump: bool = False
    is_reset: bool = False
    """Resets the connection of each request."""

    dies_on_request: bool = False
    poison: int | None = None
    """Dies of every request that holds this token, with all that were under way."""

    poison_delay_s: float = 0.0
    """How long it takes to die of it."""

    hangs_after: int | None = None
    """Answers so many requests, and none after them."""

    answer_delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    """Time before each dump of a request."""

    first_times: int | None = None
    """`status`, `is_reset`, `is_doubled` and `aborts` go wrong for the first so many requests only."""

    aborts: bool = False
    """Answers as SGLang does for a request that it gave up."""

    lost_ids: int = 0
    """Reports so many prompt tokens less than were sent."""

    status: int = 0
    """Answers with this HTTP status and the text of `message`."""

    message: str = "made up"
    capture_fails: bool = False
    """Dumps nothing any more and says so in capture.json."""

    info: dict[str, Any] = field(default_factory=dict)
    """Changes to /server_info."""

    capture: dict[str, Any] = field(default_factory=dict)
    """Changes to capture.json."""

    has_no_plugin: bool = False
    old_info_path: bool = False
    """Has /get_server_info only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSettings:
    """What a server is told."""

    dump_dir: Path
    layers: tuple[int, ...] = (1, 2)
    rid_prefix: str = "eh-"
    model: str = "tiny"
    port: int = 0
    api_key: str | None = None


class FakeSglang:
    """The server; `requests` are the bodies that `/generate` was sent, in order."""

    def __init__(self, settings: FakeSettings, faults: Faults) -> None:
        """Bind the port and write capture.json."""
        self.settings = settings
        self.faults = faults
        self.requests: list[dict[str, Any]] = []
        self.asked = itertools.count()
        self.held = threading.Condition()
        self.served: list[str] = []
        self.num_faults = 0
        self.http = ThreadingHTTPServer(("127.0.0.1", settings.port), type("Handler", (_Handler,), {"fake": self}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        if not faults.has_no_plugin:
            self.write_status(**faults.capture)

    def start(self) -> FakeSglang:
        """Serve from a thread."""
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop serving."""
        self.http.shutdown()
        self.http.server_close()

    def write_status(self, **changes: Any) -> None:
        """Write capture.json as the plugin does."""
        values = {
            "state": "ready",
            "message": "",
            "pid": os.getpid(),
            "model_class": "LlamaForCausalLM",
            "layers": list(self.settings.layers),
            "num_layers": 4,
            "hidden_size": HIDDEN,
            "dtype": "bfloat16",
            "rid_prefix": self.settings.rid_prefix,
            "engine_version": VERSION,
            "plugin_version": "0.1.0",
        }
        status = codec.decode(
            CaptureStatus,
            {"kind": CaptureStatus.KIND, "version": CaptureStatus.VERSION, **values, **changes},
            where="fake",
        )
        codec.write_record(self.settings.dump_dir / CaptureStatus.FILENAME, status)

    def info(self) -> dict[str, Any]:
        """Return what /server_info says."""
        values = {
            "version": VERSION,
            "model_path": self.settings.model,
            "disable_radix_cache": True,
            "speculative_algorithm": None,
            "pp_size": 1,
            "dp_size": 1,
            "enable_dp_attention": False,
            "cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "disabled"}},
            "chunked_prefill_size": CHUNK,
            "device": "cpu",
            "api_key": self.settings.api_key,
        }
        values |= self.faults.info
        return {name: value for name, value in values.items() if value != "MISSING"}

    def wait_for_turn(self, rid: str) -> None:
        """Hold a request back until `reverse_after` are there, and let the last through first."""
        with self.held:
            self.served.append(rid)
            self.held.notify_all()
            self.held.wait_for(lambda: len(self.served) >= self.faults.reverse_after, timeout=60)
        time.sleep(max(0.0, 0.05 * (self.faults.reverse_after - self.served.index(rid))))

    def goes_wrong(self) -> bool:
        """Count a request; tell whether it is one of the first, that go wrong."""
        with self.held:
            self.num_faults += 1
            return self.faults.first_times is None or self.num_faults <= self.faults.first_times

    def dump(self, body: dict[str, Any], *, is_doubled: bool = False) -> None:
        """Write the dumps of one request."""
        rid, ids = body["rid"], body["input_ids"]
        is_trial = "-trial-" in rid
        if not rid.startswith(self.settings.rid_prefix) or self.faults.has_no_plugin:
            return
        if self.faults.no_trial_dump if is_trial else self.faults.no_dumps:
            return
        faults = Faults() if is_trial else self.faults
        if faults.capture_fails:
            self.write_status(state="failed", message="No space left on device")
            return
        time.sleep(faults.dump_delay_s)
        first = max(faults.short_rows, faults.cached_tokens)
        ranges = [(start, min(start + CHUNK, len(ids))) for start in range(first, len(ids), CHUNK)]
        if is_doubled and faults.is_doubled:
            ranges.insert(0, (0, max(1, len(ids) // 2)))
        ranges += [(len(ids) + step, len(ids) + step + 1) for step in range(faults.decode_rows)]
        for start, end in reversed(ranges):  # chunks may come in any order
            time.sleep(faults.chunk_delay_s)
            self.write(DumpName(rid=rid, start=start, end=end), [*ids, *range(faults.decode_rows)])

    def write(self, name: DumpName, ids: list[int]) -> None:
        """Write one dump of states that follow from token and position."""
        import torch
        from eaglehs.extraction.sink import write_dump
        from eaglehs.schemas.states import state_names

        ids_T = torch.tensor(ids[name.start : name.end], dtype=torch.int32)
        rows_T = ids_T + torch.arange(name.start, name.end)
        states = {
            state: ((rows_T[:, None] * (number + 1) + torch.arange(HIDDEN)) % 97).to(torch.bfloat16).contiguous()
            for number, state in enumerate(state_names(self.settings.layers))
        }
        write_dump(
            self.settings.dump_dir,
            name,
            layers=self.settings.layers,
            prompt_tokens=None,
            input_ids=ids_T.contiguous(),
            states=states,
        )


class _Handler(BaseHTTPRequestHandler):
    fake: FakeSglang

    def do_GET(self) -> None:
        if self.fake.faults.is_silent:
            time.sleep(3600)
        paths = {"/get_server_info"} if self.fake.faults.old_info_path else {"/server_info", "/get_server_info"}
        self.answer(200, self.fake.info()) if self.path in paths else self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        fake, faults = self.fake, self.fake.faults
        if faults.is_silent:
            time.sleep(3600)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fake.settings.api_key and self.headers.get("Authorization") != f"Bearer {fake.settings.api_key}":
            return self.answer(401, {"error": "Unauthorized"})
        if next(fake.asked) < faults.unready_times:
            return self.answer(503, {"error": {"message": "Server is starting"}})
        fake.requests.append(body)
        if not body["rid"].startswith("eh-") or "-trial-" in body["rid"]:
            fake.dump(body)
            return self.generated(body)
        self.die_or_hang(body)
        is_wrong = fake.goes_wrong()
        return None if is_wrong and self.refuse(body) else self.serve(body, is_doubled=is_wrong)

    def refuse(self, body: dict[str, Any]) -> bool:
        """Answer with a fault, if that is this request's."""
        faults = self.fake.faults
        if faults.is_reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif faults.status:
            self.answer(faults.status, {"error": {"message": faults.message}})
        elif faults.aborts:
            self.generated(body, finish_reason={"type": "abort", "message": faults.message})
        return bool(faults.is_reset or faults.status or faults.aborts)

    def serve(self, body: dict[str, Any], *, is_doubled: bool) -> None:
        """Dump and answer, in the order and at the speed of the faults."""
        fake, faults = self.fake, self.fake.faults
        if faults.reverse_after:
            fake.wait_for_turn(body["rid"])
        if faults.dump_delay_s:
            threading.Thread(target=fake.dump, args=(body,), kwargs={"is_doubled": is_doubled}, daemon=True).start()
            return self.generated(body)
        fake.dump(body, is_doubled=is_doubled)
        time.sleep(faults.answer_delay_s)
        return self.generated(body)

    def die_or_hang(self, body: dict[str, Any]) -> None:
        """Never return, if that is this request's fault."""
        faults = self.fake.faults
        if faults.dies_on_request or faults.poison in body["input_ids"]:
            time.sleep(faults.poison_delay_s)
            tell("RuntimeError: CUDA error: device-side assert triggered")
            os._exit(1)
        num_real = sum("-trial-" not in sent["rid"] and "-start-" not in sent["rid"] for sent in self.fake.requests)
        if faults.hangs_after is not None and num_real > faults.hangs_after:
            time.sleep(3600)

    def generated(self, body: dict[str, Any], *, finish_reason: dict[str, Any] | None = None) -> None:
        """Answer as SGLang does with --skip-tokenizer-init."""
        faults = Faults() if "-trial-" in body["rid"] else self.fake.faults
        meta = {
            "id": body["rid"],
            "finish_reason": finish_reason or {"type": "length", "length": 1},
            "prompt_tokens": len(body["input_ids"]) - faults.lost_ids,
            "completion_tokens": 1,
            "cached_tokens": faults.cached_tokens,
        }
        self.answer(200, {"output_ids": [sum(body["input_ids"]) % 97], "meta_info": meta})

    def answer(self, status: int, value: Any) -> None:
        """Send JSON."""
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


def tell(text: str) -> None:
    """Print a line to the server's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fake_site(folder: Path, *, version: str = VERSION) -> Path:
    """Make a folder for PYTHONPATH in which `sglang` is this fake, of the given version; return it."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.fakes.sglang_server import main\nmain()\n"
    )
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return folder


def to_environment(faults: Faults) -> dict[str, str]:
    """Return the variable that gives `faults` to a server in a process of its own."""
    return {FAULTS_VARIABLE: json.dumps(asdict(faults))}


def main() -> None:
    """Serve until killed, with the arguments and variables that SGLang is started with."""
    import signal

    parser = argparse.ArgumentParser()
    for flag in ("--model-path", "--host", "--api-key"):
        parser.add_argument(flag)
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    faults = Faults(**json.loads(os.environ.get(FAULTS_VARIABLE, "{}")))
    tell(f"server_args=ServerArgs(model_path={arguments.model_path!r}, api_key={arguments.api_key!r})")
    if faults.ignores_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if faults.forks:
        sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
        child = subprocess.Popen(sleeper, start_new_session=faults.forks == "daemon")
        tell(f"child {child.pid}")
    if faults.dies_after_s:
        time.sleep(faults.dies_after_s)
        tell("torch.OutOfMemoryError: CUDA out of memory")
        sys.exit(1)
    capture = capture_settings.CaptureSettings.from_environment(os.environ)
    assert capture is not None
    settings = FakeSettings(
        dump_dir=capture.dump_dir,
        layers=capture.layers,
        rid_prefix=capture.rid_prefix,
        model=arguments.model_path,
        port=arguments.port,
        api_key=arguments.api_key,
    )
    FakeSglang(settings, faults).http.serve_forever()
