"""Preupload, Git-LFS and commits."""

import base64
import hashlib
import json
import os

from .server import API, SHA, route
from .state import LFS_SUFFIXES, HubRefusalError


@route("POST", API + r"/preupload/(?P<revision>[^/]+)")
def preupload(h, kind, name, revision):
    asked, files, found = json.loads(h.body()), h.tree(kind, name, revision, write=True)[2], []
    for file in asked["files"]:
        is_binary = b"\0" in base64.b64decode(file["sample"])
        is_lfs = file["path"].endswith(LFS_SUFFIXES) or file["size"] > 10 << 20 or is_binary
        old = files.get(file["path"])  # its oid lets the client leave an unchanged file out of the commit
        oid = {"oid": old["sha256" if "pointer" in old else "oid"]} if old else {}
        found.append({"path": file["path"], "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, **oid})
    h.send(200, {"files": found})


@route("POST", r"/((?P<kind>datasets|spaces)/)?(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
def lfs_batch(h, kind, name):
    asked, hub, found, transfer = json.loads(h.body()), h.hub, [], "basic"
    h.repo(kind or "models", name, write=True)
    for item in asked["objects"]:
        answer, oid, size = {"oid": item["oid"], "size": item["size"], "authenticated": True}, item["oid"], item["size"]
        if not hub.state.has(oid):  # without actions it is here already, and the client sends nothing
            upload = {"href": f"{hub.url}/_lfs/put/{oid}"}
            if size > hub.multipart_over and "multipart" in asked.get("transfers", []):
                count = -(-size // hub.part_bytes)
                urls = {str(number): f"{hub.url}/_lfs/part/{oid}/{number}" for number in range(1, count + 1)}
                head = {"chunk_size": str(hub.part_bytes), **urls}
                upload, transfer = {"href": f"{hub.url}/_lfs/complete/{oid}", "header": head}, "multipart"
            answer["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/_lfs/verify"}}
        found.append(answer)
    h.send(200, {"transfer": transfer, "objects": found}, kind="application/vnd.git-lfs+json")


@route("PUT", r"/_lfs/put/" + SHA)
def lfs_put(h, sha):
    h.store(h.hub.state.root / "blobs" / sha, want=sha)
    h.send(200)


@route("PUT", r"/_lfs/part/" + SHA + r"/(?P<number>\d+)")
def lfs_part(h, sha, number):
    h.store(h.hub.state.root / "tmp" / f"{sha}.{number}")
    h.send(200, headers={"ETag": f'"{sha[:16]}-{number}"'})


@route("POST", r"/_lfs/complete/" + SHA)
def lfs_complete(h, sha):
    parts, root, digest = json.loads(h.body())["parts"], h.hub.state.root, hashlib.sha256()
    with open(root / "tmp" / sha, "wb") as out:
        for part in parts:
            data = (root / "tmp" / f"{sha}.{part['partNumber']}").read_bytes()
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != sha:
        raise HubRefusalError(400, "the parts do not add up to the object")
    os.replace(root / "tmp" / sha, root / "blobs" / sha)
    h.send(200, {})


@route("POST", r"/_lfs/verify")
def lfs_verify(h):
    h.send(200 if h.hub.state.has(json.loads(h.body())["oid"]) else 404, {})


@route("POST", API + r"/commit/(?P<revision>[^/]+)")
def commit(h, kind, name, revision):
    lines, state, title = [json.loads(line) for line in h.body().splitlines() if line.strip()], h.hub.state, ""
    with state.lock:
        repo, sha, files = h.tree(kind, name, revision, write=True)
        files = dict(files)
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                title = value["summary"]
                if not sha.startswith(value.get("parentCommit") or ""):
                    raise HubRefusalError(412, "A commit has happened since. Please refresh and try again.")
            else:
                apply(h, files, key, value)
        sha = state.commit(repo, revision, files, title, h.user["name"])
        state.save(kind, name, repo)
    url = f"{h.hub.url}/{'' if kind == 'models' else kind + '/'}{name}/commit/{sha}"
    h.send(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})


def apply(h, files, key, value):
    state, path = h.hub.state, value["path"]
    if key == "file":
        files[path] = state.put(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        sha = value["oid"]
        if not state.has(sha):
            raise HubRefusalError(400, f"LFS pointer of {path} names an object that was not uploaded: {sha}")
        files[path] = state.put_pointer(sha, value.get("size") or state.size(sha))
    else:  # deletedFile, deletedFolder
        gone = [full for full in files if full == path or full.startswith(path.rstrip("/") + "/")]
        if not gone:
            raise HubRefusalError(404, "A file with this name doesn't exist", "EntryNotFound")
        for full in gone:
            del files[full]
