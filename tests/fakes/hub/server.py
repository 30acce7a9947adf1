"""The fake Hub's HTTP side: one thread a connection, a log of every request, and faults on demand.

A fault is a dict; it strikes `times` requests (1) whose path matches `path` (and `method`), after letting `skip` pass:
    status, code, message, headers    answer this instead
    late                              do what was asked, then answer `status`
    after                             cut the connection after so many bytes of the request's body
    after_out                         cut it after so many bytes of a served file
"""

import hashlib
import json
import os
import re
import threading
import time
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

from .state import HubRefusalError, HubState

ROUTES = []
API = r"/api/(?P<kind>models|datasets|spaces)/(?P<name>[^/]+/[^/]+)"
SHA = r"(?P<sha>[0-9a-f]{64})"


def route(method, pattern):
    return lambda answer: ROUTES.append((method, re.compile(pattern), answer)) or answer


@dataclass
class HubServer:
    """A running fake Hub; `url` is its endpoint, `faults` and `log` are shared with the threads."""

    state: HubState
    url: str = ""
    page: int = 1000
    multipart_over: int = 64 << 20
    part_bytes: int = 32 << 20
    bytes_per_s: float = 0
    """Read uploads no faster, to have time to interrupt one; 0 for at once."""

    offers_xet_reads: bool = True
    faults: list = field(default_factory=list)
    log: list = field(default_factory=list)
    stop: object = None
    fault_lock: object = field(default_factory=threading.Lock)
    num_busy: int = 0
    """Requests that are being answered."""

    idle: object = field(default_factory=threading.Condition)

    def files(self, repo, revision="main"):
        """Path -> file of a dataset repository."""
        kept = self.state.load("datasets", repo)
        return kept["commits"][kept["refs"].get(revision, revision)]["files"]

    def refs(self, repo):
        return self.state.load("datasets", repo)["refs"]

    def body_bytes(self, pattern):
        """How many bytes came in over requests whose path matches."""
        return sum(seen["in"] for seen in list(self.log) if re.search(pattern, seen["path"]))

    def wait_until_idle(self):
        """Wait for the end of what clients have left behind that are gone."""
        with self.idle:
            assert self.idle.wait_for(lambda: not self.num_busy, timeout=120)

    def finished_puts(self):
        """SHA-256 of each LFS object that came in whole, once a time."""
        done = [seen for seen in list(self.log) if seen["path"].startswith("/_lfs/put/") and seen["status"] == 200]
        return [seen["path"].removeprefix("/_lfs/put/") for seen in done]


def start_hub(root, tokens=("hf_w:alice:write:org",), port=0, **options):
    """Start a Hub that keeps its files in `root`; tokens are `token:user:read|write[:organization...]`."""
    hub = HubServer(state=HubState(root, tokens), **options)
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads, hub.url = True, f"http://127.0.0.1:{server.server_address[1]}"
    hub.stop = lambda: (server.shutdown(), server.server_close())
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return hub


class Handler(BaseHTTPRequestHandler):
    protocol_version, hub = "HTTP/1.1", None

    def log_message(self, *parts):
        pass

    # ---- bodies
    def body_pieces(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                yield from self._pieces(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield from self._pieces(int(self.headers.get("Content-Length") or 0))
        self.is_unread = False

    def _pieces(self, left):
        while left:
            piece = self.rfile.read(min(left, 1 << 18 if not self.hub.bytes_per_s else 1 << 13))
            if not piece:
                raise ConnectionError("client went away")
            left, self.num_read = left - len(piece), self.num_read + len(piece)
            if self.hub.bytes_per_s:
                time.sleep(len(piece) / self.hub.bytes_per_s)
            self._cut_at(self.fault.get("after"), self.num_read)
            yield piece

    def _cut_at(self, limit, count):
        if limit is not None and count >= limit:
            self.connection.shutdown(2)
            raise ConnectionError("cut by a fault")

    def body(self):
        return b"".join(self.body_pieces())

    def store(self, final, want=None):
        part, digest = self.hub.state.root / "tmp" / f"{threading.get_ident()}-{time.time_ns()}", hashlib.sha256()
        with open(part, "wb") as out:
            for piece in self.body_pieces():
                digest.update(piece)
                out.write(piece)
        if want and digest.hexdigest() != want:
            raise HubRefusalError(400, f"SHA-256 of the upload is {digest.hexdigest()}, not {want}")
        os.replace(part, final)

    # ---- answers
    def send(self, status=200, value=None, headers=None, kind="application/json", length=None):
        if self.fault.get("late") and status < 300:
            self.fault = {}
            raise HubRefusalError(504, "gateway time-out")
        data, self.status = b"" if value is None else json.dumps(value).encode(), status
        self._note()
        self.send_response(status)
        sizes = {"Content-Type": kind, "Content-Length": len(data) if length is None else length}
        for key, text in {**sizes, **(headers or {})}.items():
            self.send_header(key, str(text))
        if self.is_unread:  # an unread body must not be taken for the next request
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD" and length is None:
            self.wfile.write(data)

    def send_file(self, path, headers):
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            if match[1]:
                first, last = int(match[1]), min(int(match[2] or last), last)
            else:
                first = max(0, size - int(match[2]))
            if first > last:
                return self.send(416, headers={"Content-Range": f"bytes */{size}"})
            status, headers = 206, {**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
        left = last - first + 1
        self.send(status, headers={"Accept-Ranges": "bytes", **headers}, kind="application/octet-stream", length=left)
        with open(path, "rb") as file:
            file.seek(first)
            while self.command == "GET" and left > 0 and (data := file.read(min(left, 1 << 16))):
                self.wfile.write(data)
                left -= len(data)
                self._cut_at(self.fault.get("after_out"), last + 1 - first - left)
        return None

    # ---- requests
    def _note(self):
        """Log the request: before its answer goes out, for whoever has that may look at once."""
        with self.hub.idle:
            self.seen |= {"status": self.status, "in": self.num_read, "user": self.user and self.user["name"]}
            if not self.is_noted:
                self.is_noted = True
                self.hub.log.append(self.seen)

    def answer(self):
        with self.hub.idle:
            self.hub.num_busy += 1
        try:
            self._answer()
        finally:
            with self.hub.idle:
                self.hub.num_busy -= 1
                self.hub.idle.notify_all()

    def _answer(self):
        self.fault, self.num_read, self.status, self.user, started = {}, 0, 0, None, time.time()
        self.is_unread = bool(self.headers.get("Transfer-Encoding") or int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query))
        self.is_noted, range_ = False, self.headers.get("Range")
        self.seen = {"t": round(started, 3), "method": self.command, "path": self.path, "range": range_}
        try:
            self._strike(url.path)
            self._dispatch(url.path)
        except HubRefusalError as refusal:
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            headers = {"X-Error-Message": refusal.message, **code, **refusal.headers}
            self.send(refusal.status, {"error": refusal.message}, headers)
        except OSError as fault:
            self.status, self.is_unread = f"cut ({fault})", True
        except Exception as fault:  # noqa: BLE001 - shown to whoever reads the test's output, then answered
            traceback.print_exc()
            self.send(500, {"error": f"bug in the fake: {fault!r}"})
        finally:
            self.close_connection = self.close_connection or self.is_unread
            self._note()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - names that http.server looks for

    def _strike(self, path):
        with self.hub.fault_lock:  # not the state's: a commit may wait for files that our own endpoints serve
            for fault in list(self.hub.faults):
                if not re.search(fault.get("path", ""), path) or fault.get("method", self.command) != self.command:
                    continue
                if fault.get("skip", 0) > 0:
                    fault["skip"] -= 1
                    continue
                fault["times"] = fault.get("times", 1) - 1
                if fault["times"] <= 0:
                    self.hub.faults.remove(fault)
                self.fault = fault
                break
        if self.fault.get("status") and not self.fault.get("late"):
            message = self.fault.get("message", "a fault on demand")
            raise HubRefusalError(self.fault["status"], message, self.fault.get("code"), self.fault.get("headers"))

    def _dispatch(self, path):
        for method, pattern, answer in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (match := pattern.fullmatch(path)):
                return answer(self, **{key: text and unquote(text) for key, text in match.groupdict().items()})
        raise HubRefusalError(404, f"no route for {self.command} {path}")

    # ---- rights
    def auth(self, need=False):
        header = self.headers.get("Authorization", "")
        self.user = self.hub.state.users.get(header.removeprefix("Bearer "))
        if header and not self.user:
            raise HubRefusalError(401, "Invalid credentials in Authorization header")
        if need and not self.user:
            raise HubRefusalError(401, "Invalid username or password.")
        return self.user

    def repo(self, kind, name, write=False):
        user, repo = self.auth(), self.hub.state.load(kind, name)
        is_mine = bool(user) and name.split("/")[0] in user["mine"]
        if repo is None or (repo["private"] and not is_mine):  # the same answer for both, so as not to leak names
            if user:
                raise HubRefusalError(404, "Repository not found", "RepoNotFound")
            raise HubRefusalError(401, "Invalid username or password.", "RepoNotFound")
        if write and not user:
            raise HubRefusalError(401, "Invalid username or password.")
        if write and not is_mine:
            raise HubRefusalError(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        if write and user["role"] != "write":
            raise HubRefusalError(403, "Forbidden: you must use a write token to upload to a repository.")
        return repo

    def tree(self, kind, name, revision, write=False):
        """(repository, commit, path -> file) of a branch or commit."""
        repo = self.repo(kind, name, write)
        sha = repo["refs"].get(revision) or (revision if revision in repo["commits"] else None)
        if sha is None:
            raise HubRefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, sha, repo["commits"][sha]["files"]


from . import downloads, repos, uploads, xet  # noqa: E402, F401 - each adds its routes
