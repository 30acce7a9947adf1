"""Ranges over HTTP: faults of every kind on the way, and the bytes are right or the error names file and range."""

import hashlib
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from eaglehs.builder.http_connection import Connections, shown
from eaglehs.builder.http_ranges import HttpFile, RangeClient, RemoteMissingError, RemoteReadError
from eaglehs.builder.retries import RetryPolicy, retry_after_s
from eaglehs.builder.shard_source import DatasetMismatchError

from tests.fakes.range_server import RangeServer, start_range_server

CONTENT = np.random.default_rng(0).bytes(3_000_000)
QUICK = RetryPolicy(attempts=4, first_wait_s=0.001, longest_wait_s=0.01)


@pytest.fixture
def server(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a b.tar").write_bytes(CONTENT)
    server = start_range_server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def client():
    client = RangeClient(QUICK)
    yield client
    client.close()


def file_of(server: RangeServer, size: int | None = len(CONTENT), **headers: str) -> HttpFile:
    return HttpFile(url=f"{server.url}/data/a%20b.tar", size_bytes=size, headers=headers)


def read(client: RangeClient, file: HttpFile, begin: int, end: int) -> bytes:
    target = bytearray(end - begin)
    client.read_into(file, begin, memoryview(target))
    return bytes(target)


def test_a_range_is_read_into_the_callers_memory_over_one_connection(server: RangeServer, client: RangeClient):
    for begin, end in ((0, 1), (5, 2_000_000), (2_999_999, 3_000_000)):
        assert read(client, file_of(server), begin, end) == CONTENT[begin:end]
    assert server.num_connections == 1
    assert server.ranges() == [(0, 1), (5, 2_000_000), (2_999_999, 3_000_000)]


def test_a_range_goes_on_where_the_connection_broke(server: RangeServer, client: RangeClient):
    server.faults = [(lambda number, path: number <= 2, {"cut": 1_200_000})]
    assert read(client, file_of(server), 0, 3_000_000) == CONTENT
    assert server.ranges() == [(0, 3_000_000), (1_200_000, 3_000_000), (2_400_000, 3_000_000)]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_an_answer_that_passes_is_waited_for(server: RangeServer, client: RangeClient, status: int):
    server.faults = [(lambda number, path: number <= 3, {"status": status})]
    assert read(client, file_of(server), 10, 20) == CONTENT[10:20]
    assert server.num_ranges == 4


def test_what_the_server_asks_for_is_waited_out(server: RangeServer, client: RangeClient):
    server.faults = [(lambda number, path: number == 1, {"status": 429, "headers": {"Retry-After": "1"}})]
    begun = time.monotonic()
    assert read(client, file_of(server), 10, 20) == CONTENT[10:20]
    assert time.monotonic() - begun >= 1


def test_a_long_wait_that_the_server_asks_for_is_told(server: RangeServer, client: RangeClient, monkeypatch):
    monkeypatch.setattr("eaglehs.builder.http_ranges._LONG_WAIT_S", 1)
    server.faults = [(lambda number, path: number == 1, {"status": 429, "headers": {"Retry-After": "1"}})]
    with pytest.warns(UserWarning, match=r"a%20b\.tar: the server answers 429 .*; asking again in 1 s"):
        assert read(client, file_of(server), 10, 20) == CONTENT[10:20]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("17", 17), (" 3 ", 3), ("Fri, 01 Jan 2021 00:00:00 GMT", 0), ("soon", None), ("", None), ("-5", None)],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float | None):
    assert retry_after_s(header) == seconds


def test_a_date_to_come_is_waited_for():
    header = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 60 < retry_after_s(header) <= 90


def test_any_progress_starts_the_count_of_failures_again(server: RangeServer, client: RangeClient):
    server.faults = [(lambda number, path: True, {"cut": 250_000})]
    assert read(client, file_of(server), 0, 3_000_000) == CONTENT
    assert server.num_ranges == 12  # of four tries in a row at most


def test_a_server_that_stays_down_is_an_error_with_file_range_and_reason(server: RangeServer, client: RangeClient):
    server.faults = [(lambda number, path: True, {"status": 503})]
    with pytest.raises(RemoteReadError, match=r"a%20b\.tar, bytes 10 to 20: .* 503 .*after 0 bytes and 4 tries"):
        read(client, file_of(server), 10, 20)


def test_a_server_that_is_not_there_is_an_error_with_the_reason(client: RangeClient):
    with pytest.raises(RemoteReadError, match="ConnectionRefusedError"):
        read(client, HttpFile(url="http://127.0.0.1:1/x"), 0, 10)


def test_a_missing_file_is_no_reason_to_try_again(server: RangeServer, client: RangeClient):
    with pytest.raises(RemoteMissingError, match=r"/nothing\.tar: the server answers 404"):
        read(client, HttpFile(url=f"{server.url}/nothing.tar"), 0, 10)
    assert server.num_ranges == 1


@pytest.mark.parametrize("size", [2_999_999, 3_000_001])
def test_another_size_than_the_manifests_is_refused_with_both(server: RangeServer, client: RangeClient, size: int):
    with pytest.raises(DatasetMismatchError, match=f"has 3,000,000 bytes, the manifest says {size:,}"):
        read(client, file_of(server, size), 0, 10)


def test_a_range_past_the_end_is_a_file_that_was_cut(server: RangeServer, client: RangeClient):
    with pytest.raises(DatasetMismatchError, match="has 3,000,000 bytes, the manifest says 4,000,000"):
        read(client, file_of(server, 4_000_000), 3_500_000, 3_500_010)


def test_a_server_without_ranges_is_refused_and_not_read_whole(server: RangeServer, client: RangeClient):
    server.knows_ranges = False
    with pytest.raises(RemoteReadError, match="whole files and no ranges"):
        read(client, file_of(server), 0, 10)
    assert read(client, file_of(server), 0, 3_000_000) == CONTENT  # the whole file is a range too


def test_a_redirect_is_followed_once_and_the_token_stays_at_home(server: RangeServer, client, tmp_path: Path):
    store = start_range_server(tmp_path)
    server.redirect_to, server.token = store.url, "secret"
    file = file_of(server, Authorization="Bearer secret")
    for _ in range(3):
        assert read(client, file, 5, 50) == CONTENT[5:50]
    assert len(server.log) == 1
    assert [seen["authorization"] for seen in store.log] == [None] * 3
    store.stop()


def test_an_address_that_has_expired_is_asked_for_again(server: RangeServer, client: RangeClient, tmp_path: Path):
    store = start_range_server(tmp_path)
    server.redirect_to = store.url
    store.faults = [(lambda number, path: number == 2, {"status": 403})]
    for _ in range(3):
        assert read(client, file_of(server), 5, 50) == CONTENT[5:50]
    assert len(server.log) == 2
    store.stop()


def test_a_circle_of_redirects_ends(server: RangeServer, client: RangeClient):
    server.redirect_to = server.url
    with pytest.raises(RemoteReadError, match="redirected more than"):
        read(client, file_of(server), 0, 10)


def test_closing_ends_a_wait_and_a_read_under_way(server: RangeServer, client: RangeClient):
    server.bytes_per_s = 1000
    faults: list[Exception] = []

    def read_slowly() -> None:
        try:
            read(client, file_of(server), 0, 3_000_000)
        except RemoteReadError as fault:
            faults.append(fault)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    while not server.num_ranges:
        time.sleep(0.01)
    client.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert faults


def test_closing_cuts_a_connection_that_is_made_just_then(server: RangeServer, monkeypatch: pytest.MonkeyPatch):
    connections, request = Connections(60), HTTPConnection.request

    def request_late(*what: object, **named: object) -> None:
        connections.close()  # the connection is known by now, and has no socket yet
        request(*what, **named)

    monkeypatch.setattr(HTTPConnection, "request", request_late)
    with pytest.raises(ConnectionAbortedError):
        connections.get(file_of(server).url, {})


def test_closing_goes_well_where_another_thread_drops_its_connection_meanwhile():
    class Dropped:
        """Has a socket when it is first looked at, and none after that."""

        def __init__(self) -> None:
            self.sockets = [SimpleNamespace(shutdown=lambda _: None)]

        @property
        def sock(self) -> SimpleNamespace | None:
            return self.sockets.pop() if self.sockets else None

    connections = Connections(60)
    connections._all.add(Dropped())  # type: ignore[arg-type]
    connections.close()


def test_many_threads_read_one_file_right(server: RangeServer, client: RangeClient):
    server.every(10, status=429)
    server.every(7, cut=1000)
    target = bytearray(len(CONTENT))
    view = memoryview(target)

    def part(number: int) -> None:
        for begin in range(number * 50_000, len(CONTENT), 8 * 50_000):
            client.read_into(file_of(server), begin, view[begin : begin + 50_000])

    threads = [threading.Thread(target=part, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hashlib.sha256(target).digest() == hashlib.sha256(CONTENT).digest()


def test_errors_show_neither_password_nor_signature():
    assert shown("https://me:pass@host:81/a/b.tar?X-Signature=abc") == "https://host:81/a/b.tar"


def test_proxies_of_the_environment_are_used(server: RangeServer, monkeypatch: pytest.MonkeyPatch):
    # the fake server is the proxy: it gets the whole URL, and takes the path of it
    monkeypatch.setenv("http_proxy", server.url)
    connections = Connections(5)
    response = connections.get("http://far.away.invalid/data/a%20b.tar", {"Range": "bytes=0-9"})
    assert response.read() == CONTENT[:10]
    connections.close()


def test_waits_grow_and_are_spread():
    policy = RetryPolicy(first_wait_s=1, longest_wait_s=8)
    waits = [[policy.wait_s(failures, None) for _ in range(50)] for failures in (1, 2, 3, 9)]
    assert [max(row) <= top for row, top in zip(waits, (1, 2, 4, 8), strict=True)] == [True] * 4
    assert [min(row) >= top / 2 for row, top in zip(waits, (1, 2, 4, 8), strict=True)] == [True] * 4
    assert len(set(waits[0])) > 40
    assert policy.wait_s(1, 20) >= 20
