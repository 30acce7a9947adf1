"""Account, repositories, branches, listings."""

import hashlib
import json
import re
from urllib.parse import parse_qsl, urlsplit

from .server import API, route
from .state import HubRefusalError, now


@route("GET", r"/api/whoami-v2")
def whoami(h):
    user = h.auth(need=True)
    orgs = [{"type": "org", "id": org, "name": org, "roleInOrg": user["role"]} for org in user["mine"][1:]]
    token = {"displayName": "fake", "role": user["role"]}
    name = {"type": "user", "id": user["name"], "name": user["name"], "fullname": user["name"], "isPro": False}
    h.send(200, {**name, "orgs": orgs, "auth": {"type": "access_token", "accessToken": token}})


@route("POST", r"/api/repos/create")
def create(h):
    asked, user, state = json.loads(h.body()), h.auth(need=True), h.hub.state
    kind, owner = (asked.get("type") or "model") + "s", asked.get("organization") or user["name"]
    name = f"{owner}/{asked['name']}"
    url = f"{h.hub.url}/{'' if kind == 'models' else kind + '/'}{name}"
    if owner not in user["mine"] or user["role"] != "write":
        raise HubRefusalError(403, f'You don\'t have the rights to create a {kind[:-1]} under the namespace "{owner}"')
    with state.lock:
        if state.load(kind, name):
            return h.send(409, {"error": f"You already created this {kind[:-1]} repo", "url": url})
        is_private = asked.get("private") or asked.get("visibility") == "private"
        state.save(kind, name, state.new_repo(bool(is_private), user["name"]))
    return h.send(200, {"url": url, "name": name, "id": name})


@route("PUT", API + r"/settings")
def settings(h, kind, name):
    asked, repo = json.loads(h.body()), h.repo(kind, name, write=True)
    if "visibility" in asked or "private" in asked:
        repo["private"] = asked.get("private", asked.get("visibility") == "private")
    repo["gated"] = asked.get("gated", repo["gated"])
    h.hub.state.save(kind, name, repo)
    h.send(200, {})


@route("GET", API + r"/auth-check(/(?P<mode>write))?")
def auth_check(h, kind, name, mode):
    repo = h.repo(kind, name, write=bool(mode))
    check_gate(h, kind, name, repo)
    h.send(200, {})


def check_gate(h, kind, name, repo):
    if repo["gated"] and not (h.user and name.split("/")[0] in h.user["mine"]):
        raise HubRefusalError(403 if h.user else 401, f"Access to {kind[:-1]} {name} is restricted.", "GatedRepo")


@route("POST", r"/api/validate-yaml")
def validate_yaml(h):
    match = re.match(r"---\s*\n(.*?)\n---", json.loads(h.body())["content"], re.DOTALL)
    lines = (match[1] if match else "").splitlines()
    bad = [line for line in lines if line and not re.match(r"\s|-|#|[\w.-]+\s*:", line)]
    warnings = [] if match else [{"message": "empty or missing yaml metadata in repo card"}]
    h.send(400 if bad else 200, {"errors": [{"message": f"not YAML: {line}"} for line in bad], "warnings": warnings})


@route("POST", API + r"/branch/(?P<branch>[^/]+)")
def create_branch(h, kind, name, branch):
    asked, state = json.loads(h.body() or b"{}"), h.hub.state
    with state.lock:
        repo, sha, _ = h.tree(kind, name, asked.get("startingPoint") or "main", write=True)
        if branch in repo["refs"]:
            raise HubRefusalError(409, "Reference already exists")
        repo["refs"][branch] = sha
        state.save(kind, name, repo)
    h.send(200, {})


@route("DELETE", API + r"/branch/(?P<branch>[^/]+)")
def delete_branch(h, kind, name, branch):
    with h.hub.state.lock:
        repo, _, _ = h.tree(kind, name, branch, write=True)
        del repo["refs"][branch]
        h.hub.state.save(kind, name, repo)
    h.send(200, {})


@route("GET", API + r"/refs")
def refs(h, kind, name):
    heads = h.repo(kind, name)["refs"].items()
    branches = [{"name": head, "ref": f"refs/heads/{head}", "targetCommit": sha} for head, sha in heads]
    h.send(200, {"branches": branches, "tags": [], "converts": []})


@route("GET", API + r"/commits/(?P<revision>[^/]+)")
def commits(h, kind, name, revision):
    repo, sha, _ = h.tree(kind, name, revision)
    found = []
    while sha:
        commit = repo["commits"][sha]
        head = {"id": sha, "title": commit["title"], "message": "", "date": commit["date"]}
        found.append({**head, "authors": [{"user": commit["author"]}]})
        sha = commit["parent"]
    h.send(200, found)


@route("GET", API + r"(/revision/(?P<revision>[^/]+))?")
def info(h, kind, name, revision):
    repo, sha, files = h.tree(kind, name, revision or "main")
    siblings = []
    for path, file in sorted(files.items()):
        lfs = {"sha256": file["sha256"], "size": file["size"], "pointerSize": file.get("pointer")}
        blob = {"size": file["size"], "blobId": file["oid"], **({"lfs": lfs} if "pointer" in file else {})}
        siblings.append({"rfilename": path, **(blob if h.query.get("blobs") else {})})
    rights = {"private": repo["private"], "gated": repo["gated"], "disabled": False}
    head = {"_id": name, "id": name, "author": name.split("/")[0], "sha": sha, **rights}
    dates = {"createdAt": repo["created"], "lastModified": repo["commits"][sha]["date"]}
    h.send(200, {**head, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings, **dates})


def entry(h, path, file, expand=False):
    found = {"type": "file", "oid": file["oid"], "size": file["size"], "path": path}
    if "pointer" in file:
        sha = h.hub.state.forged.get(path, file["sha256"])
        found["lfs"] = {"oid": sha, "size": file["size"], "pointerSize": file["pointer"]}
        found.update({"xetHash": file["xet"]} if file["xet"] else {})
    return {**found, "lastCommit": {"id": "0" * 40, "title": "fake", "date": now()}} if expand else found


def folder(path):
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}


@route("GET", API + r"/tree/(?P<revision>[^/]+)(/(?P<path>.*))?")
def tree(h, kind, name, revision, path):
    path = (path or "").strip("/")
    base, found = path + "/" if path else "", {}
    is_deep, expand = (h.query.get(key, "").lower() == "true" for key in ("recursive", "expand"))
    for full, file in h.tree(kind, name, revision)[2].items():
        if full.startswith(base):
            parts = full[len(base) :].split("/")
            for depth in range(1, len(parts) if is_deep else min(2, len(parts))):
                above = base + "/".join(parts[:depth])
                found[above] = folder(above)
            if is_deep or len(parts) == 1:
                found[full] = entry(h, full, file, expand)
    if path and not found:
        raise HubRefusalError(404, f'{path} does not exist on "{revision}"', "EntryNotFound")
    start = int(h.query.get("cursor", 0))
    end = start + (50 if expand else h.hub.page)
    url = f"{h.hub.url}{urlsplit(h.path).path}?recursive={is_deep}&expand={expand}&cursor={end}"
    link = {"Link": f'<{url}>; rel="next"'} if end < len(found) else {}
    h.send(200, [found[full] for full in sorted(found)[start:end]], link)


@route("POST", API + r"/paths-info/(?P<revision>[^/]+)")
def paths_info(h, kind, name, revision):
    form, files = parse_qsl(h.body().decode()), h.tree(kind, name, revision)[2]
    paths = [text.strip("/") for key, text in form if key == "paths"]
    expand = ("expand", "true") in form
    is_folder = {path for path in paths if any(full.startswith(path + "/") for full in files)}
    known = [path for path in paths if path in files or path in is_folder]
    h.send(200, [entry(h, path, files[path], expand) if path in files else folder(path) for path in known])
