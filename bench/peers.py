"""litdata and MDS (mosaicml-streaming) on the same tensors, each in its own format: `constraints/bench.txt` has them.

Neither takes bfloat16: litdata gets the same bits as int16, MDS as arrays of uint16.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Sample = dict[str, Any]
Samples = Callable[[], Iterable[Sample]]
SHARD_BYTES = 2_000_000_000


def open_peers(root: Path) -> dict[str, Samples]:
    """Write the samples of `root`/pt in each peer's format, unless that is done; return its reader, opened once.

    A peer that is not installed is named on stderr and left out.
    """
    found: dict[str, Samples] = {}
    for name, package, opened in (
        ("litdata, its own chunks", "litdata", open_litdata),
        ("MDS (mosaicml-streaming), its own shards", "streaming", open_mds),
    ):
        if importlib.util.find_spec(package) is None:
            print(f"{name}: not installed; see constraints/bench.txt", file=sys.stderr)
        else:
            found[name] = opened(root)
    return found


def saved_samples(root: Path) -> Iterable[dict[str, torch.Tensor]]:
    """Yield the tensors of each sample, states as int16."""
    for path in sorted((root / "pt").iterdir()):
        tensors: Mapping[str, torch.Tensor] = torch.load(path)
        yield {n: v.view(torch.int16) if v.dtype == torch.bfloat16 else v for n, v in tensors.items()}


def open_litdata(root: Path) -> Samples:
    import litdata
    from litdata.streaming.writer import BinaryWriter

    folder = root / "lit"
    if not (folder / "index.json").exists():
        writer = BinaryWriter(str(folder), chunk_bytes=SHARD_BYTES)
        folder.mkdir(exist_ok=True)
        for number, tensors in enumerate(saved_samples(root)):
            writer[number] = tensors
        writer.done()
        writer.merge(1)
    dataset = litdata.StreamingDataset(str(folder))
    return lambda: dataset


def open_mds(root: Path) -> Samples:
    import transformers  # noqa: F401 - MDS imports it, and it looks for torchvision

    with standing_in_for_torchvision():
        import streaming

    folder = root / "mds"
    if not (folder / "index.json").exists():
        columns: dict[str, str] | None = None
        writer = None
        for tensors in saved_samples(root):
            arrays = {name: value.numpy() for name, value in tensors.items()}
            arrays = {name: v.view(np.uint16) if v.dtype == np.int16 else v for name, v in arrays.items()}
            if columns is None:
                columns = {name: f"ndarray:{value.dtype}" for name, value in arrays.items()}
                writer = streaming.MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES)
            writer.write(arrays)
        writer.finish()
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
    return lambda: dataset


@contextlib.contextmanager
def standing_in_for_torchvision() -> Iterable[None]:
    """Let MDS be imported without torchvision, of whose names it only makes datasets of pictures."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    names = {"torchvision": "", "torchvision.datasets": "VisionDataset", "torchvision.transforms": ""}
    names["torchvision.transforms.functional"] = "to_tensor"
    made = {name: types.ModuleType(name) for name in names}
    for name, member in names.items():
        setattr(made[name], member or "__doc__", type(member or name, (), {}))
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
