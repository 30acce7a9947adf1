"""Xet: tokens, xorbs, shards, and how a file is put together again."""

import hashlib
import re
import time

from .server import API, SHA, route
from .state import HubRefusalError


@route("GET", API + r"/xet-(?P<mode>read|write)-token/(?P<revision>[^/]+)")
def token(h, kind, name, mode, revision):
    h.repo(kind, name, write=mode == "write")
    url, expiry = h.hub.url, int(time.time()) + 3600
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": "stub", "X-Xet-Token-Expiration": expiry}
    h.send(200, {"accessToken": "stub", "exp": expiry, "casUrl": url}, headers)


@route("POST", r"/v1/xorb-grants/default/" + SHA)
def grant(h, sha):
    """200: the xorb is here already; 201: send it to this URL."""
    h.body()
    is_new = not (h.hub.state.root / "xorbs" / sha).exists()
    place = {"id": "g1", "method": "PUT", "url": f"{h.hub.url}/_xorb/{sha}", "headers": {}}
    h.send(201 if is_new else 200, place)


@route("POST", r"/v1/xorb-commits/default/" + SHA + r"/grant/(?P<grant>.+)")
def grant_done(h, sha, grant):
    h.body()
    h.send(200 if (h.hub.state.root / "xorbs" / sha).exists() else 404, {})


@route("PUT", r"/_xorb/" + SHA)
@route("POST", r"/v1/xorbs/default/" + SHA)
def put_xorb(h, sha):
    h.store(h.hub.state.root / "xorbs" / sha)
    h.send(200, {"was_inserted": True})


@route("POST", r"/v1/shards")
def put_shard(h):
    data, state = h.body(), h.hub.state
    with state.lock:
        state.index_xet_shard(data)
        (state.root / "shards" / hashlib.sha256(data).hexdigest()).write_bytes(data)
    h.send(200, {"result": 1})


@route("GET", r"/v1/reconstructions/" + SHA)
def reconstruction(h, sha):
    if sha not in h.hub.state.xet_files:
        raise HubRefusalError(404, "file not found")
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", h.headers.get("Range", ""))
    low, high = (int(match[1]), int(match[2])) if match else (0, 1 << 62)
    at, skip, terms, fetch = 0, 0, [], {}
    for xorb, first, end, size in h.hub.state.xet_files[sha]:
        if at + size > low and at <= high:
            skip = skip if terms else max(0, low - at)
            offsets, chunks = h.hub.state.chunk_offsets(xorb), {"start": first, "end": end}
            terms.append({"hash": xorb, "unpacked_length": size, "range": chunks})
            place = {"start": offsets[first], "end": offsets[end] - 1}
            fetch.setdefault(xorb, []).append({"range": chunks, "url": f"{h.hub.url}/_xorb/{xorb}", "url_range": place})
        at += size
    if not terms:
        raise HubRefusalError(416, "range not satisfiable")
    h.send(200, {"offset_into_first_range": skip, "terms": terms, "fetch_info": fetch})


@route("GET", r"/_xorb/" + SHA)
def get_xorb(h, sha):
    h.send_file(h.hub.state.root / "xorbs" / sha, {})
