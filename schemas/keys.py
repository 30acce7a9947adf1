"""Keys: the safe name that a sample has everywhere, made from the user's own id.

`webdataset` and `datasets` take everything after the first dot of a member's name as its column and skip names that
start with `__` or `.`; request ids end in file names; some file systems fold case. So a key is `[a-z0-9][a-z0-9_-]*`,
at most 64 characters. An id of that form is its own key; any other id becomes a readable stem and a hash of the whole
id, so that ids that differ in case, blanks or punctuation alone still get keys of their own.
"""

from __future__ import annotations

import hashlib
import re

MAX_KEY_CHARS = 64
_STEM_CHARS = 40
_SHOWN_CHARS = 100
_KEY = re.compile(r"[a-z0-9][a-z0-9_-]*")
_UNSAFE = re.compile(r"[^a-z0-9_-]+")


def is_key(text: str) -> bool:
    """Tell whether `text` is a valid key."""
    return len(text) <= MAX_KEY_CHARS and _KEY.fullmatch(text) is not None


def make_key(sample_id: str) -> str:
    """Return the key of a user's id: the id itself where it is safe, else a stem and ten hex digits of its BLAKE2b."""
    if is_key(sample_id):
        return sample_id
    stem = _UNSAFE.sub("-", sample_id.lower()).strip("-_")[:_STEM_CHARS].rstrip("-_")
    digest = hashlib.blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()
    return f"{stem}-{digest}" if stem else f"id-{digest}"


def shown_id(sample_id: str) -> str:
    """Return a user's id as a line of text can hold it: long ones cut, and what moves a terminal's cursor escaped."""
    cut = sample_id if len(sample_id) <= _SHOWN_CHARS else sample_id[:_SHOWN_CHARS]
    safe = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
    return safe if cut == sample_id else f"{safe}... ({len(sample_id):,} characters)"


def fan_out(key: str) -> str:
    """Return the two-character folder of a key's dumps, spread evenly (256 folders)."""
    return hashlib.blake2b(key.encode(), digest_size=1).hexdigest()
