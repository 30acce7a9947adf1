"""A Hugging Face Hub on loopback, standard library only; real clients push to it and stream from it.

It proves what the client sends and how it lives with faults, not what the real Hub answers: its texts are imitations.
Kept: preupload, Git-LFS (basic, multipart), Xet (grants, xorbs, shards, reconstructions), commits, branches, private
and gated repositories, redirects to another host, pages. Not kept: quotas, tags, pull requests, rate limits, YAML
beyond a line check; objects are deduplicated over all repositories, as on the Hub only within one.
Where it differs on purpose: the 401 of a missing repository bears an error code, since clients guess it only on https.
Files that came by Xet are put together again by hf_xet, so it must be installed where the server runs.

    server.py      start_hub: threads, the request log, faults                   HubServer
    state.py       blobs, repositories, commits, users                           HubState
    repos.py  uploads.py  downloads.py  xet.py      the endpoints
"""

from .server import HubServer, start_hub

__all__ = ["HubServer", "start_hub"]
