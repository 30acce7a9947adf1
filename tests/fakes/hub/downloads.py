"""Files: resolve, with the Hub's redirects, and the host behind them."""

from urllib.parse import quote

from .repos import check_gate
from .server import SHA, route
from .state import HubRefusalError

_NAME = r"(?P<name>[^/]+/[^/]+)"


@route("GET", r"/((?P<kind>datasets|spaces)/)?" + _NAME + r"/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
@route(
    "GET",
    r"/api/resolve-cache/(?P<kind>models|datasets|spaces)/" + _NAME + r"/(?P<revision>[0-9a-f]{40})/(?P<path>.+)",
)
def resolve(h, kind, name, revision, path):
    kind, hub = kind or "models", h.hub
    repo, sha, files = h.tree(kind, name, revision)
    check_gate(h, kind, name, repo)
    file = files.get(path)
    if file is None:
        raise HubRefusalError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": sha})
    etag = '"{}"'.format(file["sha256" if "pointer" in file else "oid"])
    headers = {"X-Repo-Commit": sha, "ETag": etag}
    if "pointer" in file:  # the Hub sends these to a signed URL of another host
        headers |= {"X-Linked-Etag": etag, "X-Linked-Size": file["size"]}
        if file["xet"] and hub.offers_xet_reads:
            link = f'<{hub.url}/api/{kind}/{name}/xet-read-token/{sha}>; rel="xet-auth"'
            headers |= {"X-Xet-Hash": file["xet"], "Link": link}
        host = "127.0.0.1" if h.headers["Host"].startswith("localhost") else "localhost"
        place = f"http://{host}:{hub.url.split(':')[-1]}/_cdn/{file['sha256']}"
        return h.send(302, headers={**headers, "Location": place})
    if not h.path.startswith("/api/resolve-cache/"):  # and small files to a cached path on the same host
        place = f"/api/resolve-cache/{kind}/{name}/{sha}/{quote(path)}"
        return h.send(307, headers={"X-Repo-Commit": sha, "X-Linked-Etag": etag, "Location": place})
    return h.send_file(hub.state.blob(file["sha256"], hub.url), headers)


@route("GET", r"/_cdn/" + SHA)
def cdn(h, sha):
    if h.headers.get("Authorization"):
        raise HubRefusalError(400, "the Authorization header must not reach the CDN")
    h.send_file(h.hub.state.blob(sha, h.hub.url), {"ETag": f'"{sha}"'})
