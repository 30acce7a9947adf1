"""An HTTP server of a folder on loopback that can be slow, far away and faulty: what a real link does at times.

It proves that the reader asks for ranges, goes on after faults and hides latency; not how a real store behaves. A fault
is a dict; it strikes the requests for which `when(number, path)` is true, counted from 1 over requests with a Range:
    status, headers    answer this instead
    cut                close the connection after so many bytes of the body
    total              say in Content-Range that the file has so many bytes
    flip               change the byte at this offset of the file
"""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class RangeServer:
    """A running server."""

    root: Path
    bytes_per_s: float = 0
    """Over all connections together; 0 for no limit."""

    latency_s: float = 0
    """Before each answer."""

    knows_ranges: bool = True
    redirect_to: str = ""
    """Base URL to which shards are redirected."""

    token: str = ""
    """Asked for by Authorization, unless empty."""

    faults: list[tuple[Callable[[int, str], bool], dict]] = field(default_factory=list)
    log: list[dict] = field(default_factory=list)
    url: str = ""
    num_ranges: int = 0
    num_connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    next_free: float = 0
    stop: Callable[[], None] = lambda: None

    def bytes_sent(self, pattern: str = "") -> int:
        return sum(seen["sent"] for seen in list(self.log) if re.search(pattern, seen["path"]))

    def ranges(self, pattern: str = "") -> list[tuple[int, int]]:
        return [seen["range"] for seen in list(self.log) if seen["range"] and re.search(pattern, seen["path"])]

    def every(self, count: int, **fault) -> None:
        """Strike every `count`-th request with a Range."""
        self.faults.append((lambda number, path: number % count == 0, fault))

    def pace(self, length: int) -> None:
        """Wait as long as `length` bytes take on the one link that all share."""
        if not self.bytes_per_s:
            return
        with self.lock:
            now = time.monotonic()
            self.next_free = max(self.next_free, now) + length / self.bytes_per_s
            wait = self.next_free - now
        time.sleep(wait)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: RangeServer

    def setup(self):
        super().setup()
        with self.server_of.lock:
            self.server_of.num_connections += 1

    def do_GET(self):
        server = self.server_of
        path = unquote(urlsplit(self.path).path)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        seen = {"path": path, "range": match and (int(match[1]), int(match[2]) + 1), "sent": 0}
        seen["authorization"] = self.headers.get("Authorization")
        server.log.append(seen)
        with server.lock:
            server.num_ranges += bool(match)
            number = server.num_ranges
        time.sleep(server.latency_s)
        fault = next((fault for when, fault in server.faults if match and when(number, path)), {})
        if server.token and seen["authorization"] != f"Bearer {server.token}":
            self.answer(401)
            return
        if server.redirect_to and path.endswith(".tar"):
            self.answer(302, {"Location": server.redirect_to + path})
            return
        if "status" in fault:
            self.answer(fault["status"], fault.get("headers", {}))
            return
        file = server.root / path.lstrip("/")
        if not file.is_file():
            self.answer(404)
            return
        self.serve(file, seen, fault if match else {}, match if server.knows_ranges else None)

    def serve(self, file, seen, fault, match):
        size = file.stat().st_size
        begin, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if begin >= size:
            self.answer(416, {"Content-Range": f"bytes */{size}"})
            return
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{fault.get('total', size)}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        with file.open("rb") as content:
            content.seek(begin)
            left = min(end - begin, fault.get("cut", end - begin))
            while left:
                place = content.tell()
                piece = bytearray(content.read(min(left, 256 * 1024)))
                if place <= fault.get("flip", -1) < place + len(piece):
                    piece[fault["flip"] - place] ^= 1
                self.server_of.pace(len(piece))
                seen["sent"] += len(piece)  # before it is there: who has all of it may look at once
                self.wfile.write(piece)
                left -= len(piece)
        if "cut" in fault:
            self.close_connection = True

    def answer(self, status, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def start_range_server(root: Path, **options) -> RangeServer:
    """Serve the files of `root` on a free port."""
    server = RangeServer(root=root, **options)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"server_of": server}))
    http.daemon_threads, http.request_queue_size = True, 64
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    server.stop = lambda: (http.shutdown(), http.server_close())
    http.handle_error = lambda *_: None  # clients that hang up are what tests do
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server
