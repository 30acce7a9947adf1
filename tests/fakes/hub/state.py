"""What the fake Hub keeps: blobs by SHA-256, a JSON file a repository, a tree a commit, users by token."""

import hashlib
import json
import os
import struct
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

LFS_SUFFIXES = (
    ".7z",
    ".arrow",
    ".bin",
    ".gz",
    ".npy",
    ".npz",
    ".parquet",
    ".pt",
    ".png",
    ".safetensors",
    ".tar",
    ".zip",
)


class HubRefusalError(Exception):
    """An answer that is no success."""

    def __init__(self, status, message, code=None, headers=None):
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}


def now():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def xet_hex(raw):
    """A Merkle hash is printed as four little-endian u64."""
    return b"".join(raw[i : i + 8][::-1] for i in range(0, 32, 8)).hex()


class HubState:
    def __init__(self, root, tokens):
        self.root, self.lock, self.users = Path(root), threading.RLock(), {}
        for token, name, role, *orgs in (text.split(":") for text in tokens):
            self.users[token] = {"name": name, "role": role, "mine": [name, *orgs]}
        for folder in ("blobs", "tmp", "repos", "xorbs", "shards"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        self.xet_files = {}  # Xet hash -> [(xorb, first chunk, end chunk, bytes)]
        self.by_sha = {}  # SHA-256 -> (Xet hash, size)
        self.forged = {}  # path -> SHA-256 that listings show instead of the true one
        for path in (self.root / "shards").iterdir():
            self.index_xet_shard(path.read_bytes())

    def _path(self, kind, name):
        return self.root / "repos" / f"{kind}--{name.replace('/', '--')}.json"

    def load(self, kind, name):
        path = self._path(kind, name)
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, kind, name, repo):
        new = self._path(kind, name).with_suffix(".new")
        new.write_text(json.dumps(repo))
        os.replace(new, self._path(kind, name))

    def put(self, data):
        sha = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / sha).write_bytes(data)
        return {"size": len(data), "sha256": sha, "oid": git_oid(data)}

    def put_pointer(self, sha, size):
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()
        xet = self.by_sha.get(sha, [None])[0]
        return {"size": size, "sha256": sha, "oid": git_oid(text), "pointer": len(text), "xet": xet}

    def new_repo(self, private, author):
        repo = {"private": private, "gated": False, "refs": {}, "commits": {}, "created": now()}
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()
        self.commit(repo, "main", {".gitattributes": self.put(attributes)}, "initial commit", author)
        return repo

    def commit(self, repo, ref, files, title, author):
        parent = repo["refs"].get(ref)
        sha = hashlib.sha1(json.dumps([files, parent, title, time.time_ns()]).encode()).hexdigest()
        repo["commits"][sha] = {"files": files, "parent": parent, "title": title, "date": now(), "author": author}
        repo["refs"][ref] = sha
        return sha

    def has(self, sha):
        return (self.root / "blobs" / sha).exists() or sha in self.by_sha

    def size(self, sha):
        path = self.root / "blobs" / sha
        return path.stat().st_size if path.exists() else self.by_sha[sha][1]

    def blob(self, sha, url):
        """The file of an object; one that came in by Xet is rebuilt once, through our own reconstruction endpoint."""
        path = self.root / "blobs" / sha
        with self.lock:
            if not path.exists() and sha in self.by_sha:
                self._rebuild(sha, url, path)
        return path

    def _rebuild(self, sha, url, path):
        import hf_xet

        part, expiry = self.root / "tmp" / sha, int(time.time()) + 3600
        session = hf_xet.XetSession()
        with session.new_file_download_group(endpoint=url, token="stub", token_expiry_unix_secs=expiry) as group:
            group.start_download_file(hf_xet.XetFileInfo(*self.by_sha[sha]), str(part))
        with open(part, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == sha
        os.replace(part, path)

    def index_xet_shard(self, data):
        """Note the files of an uploaded Xet shard: a 48-byte header, then records of 48 bytes a file.

        A file is its header, its terms, as many verification records if it has them, and its SHA-256 if it has one.
        """
        at, found = 48, []
        while data[at : at + 32] != b"\xff" * 32:
            raw, (flags, num_terms) = data[at : at + 32], struct.unpack_from("<II", data, at + 32)
            terms = [self._term(data, at + 48 * number) for number in range(1, num_terms + 1)]
            at += 48 * (1 + num_terms * (2 if flags >> 31 & 1 else 1))
            has_sha = flags >> 30 & 1
            found.append((xet_hex(raw), terms, xet_hex(data[at : at + 32]) if has_sha else None))
            at += 48 * has_sha
        for xet, terms, sha in found:
            self.xet_files[xet] = terms
            if sha:
                self.by_sha[sha] = (xet, sum(term[3] for term in terms))

    def _term(self, data, at):
        _, size, first, end = struct.unpack_from("<IIII", data, at + 32)
        xorb = xet_hex(data[at : at + 32])
        if not (self.root / "xorbs" / xorb).exists():
            raise HubRefusalError(400, f"shard names a xorb that was not uploaded: {xorb}")
        return xorb, first, end, size

    def chunk_offsets(self, xorb):
        """Where the chunks of a xorb begin: u8 version, u24 packed size, u8 scheme, u24 size before each."""
        offsets, at, data = [0], 0, (self.root / "xorbs" / xorb).read_bytes()
        while at + 8 <= len(data) and data[at] == 0:
            at += 8 + int.from_bytes(data[at + 1 : at + 4], "little")
            offsets.append(at)
        return offsets
