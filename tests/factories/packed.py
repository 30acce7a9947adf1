"""Packs synthetic runs as `pack` does, and reads the shards with Python's tarfile alone."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
from eaglehs.builder.pack import PackSettings, PackSummary, pack_run
from eaglehs.schemas.codec import loads
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.sample import SampleMeta

from tests.factories.runs import SyntheticRun

SIZE = 20_480
"""Bytes of a shard: a few samples of a synthetic run."""


def pack(run: SyntheticRun, out: Path, **settings: object) -> PackSummary:
    return pack_run(run.root, out, PackSettings(**{"shard_size_bytes": SIZE, **settings}), Silent())


def files(root: Path) -> dict[str, str]:
    """Visible files of a dataset -> SHA-256."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }


def members(root: Path) -> dict[str, dict[str, bytes]]:
    """Key -> column -> bytes, as Python's tarfile finds them in all shards, in order."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted((root / "data").iterdir()):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, column = member.name.partition(".")
                assert column not in found.setdefault(key, {})
                found[key][column] = tar.extractfile(member).read()
    return found


def check_bits(run: SyntheticRun, root: Path, keys: list[str]) -> None:
    found = members(root)
    assert sorted(found) == sorted(keys)
    for key in keys:
        bits = run.bits(key)
        meta = loads(SampleMeta, found[key]["meta.json"].decode(), where=key)
        assert (meta.key, meta.id, meta.num_tokens) == (key, run.prompt(key).id, len(bits["input_ids"]))
        assert meta.next_token == run.next_tokens[key]
        columns = {column.removesuffix(".npy").removesuffix(".bf16"): column for column in found[key]}
        assert list(columns) == ["meta.json", *bits]
        for name, wanted in bits.items():
            array = np.load(io.BytesIO(found[key][columns[name]]))
            assert array.dtype == wanted.dtype
            assert np.array_equal(array, wanted)
