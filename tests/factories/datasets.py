"""Packed datasets of made-up samples."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.schemas.codec import read_record
from eaglehs.schemas.manifest import DatasetFolder, Manifest
from eaglehs.schemas.progress import Silent

from tests.factories.runs import SyntheticRun, make_run


@dataclass
class SyntheticDataset:
    """A dataset folder, and the run that it was packed from."""

    folder: DatasetFolder
    run: SyntheticRun

    @property
    def root(self) -> Path:
        return self.folder.root

    @property
    def manifest(self) -> Manifest:
        return read_record(Manifest, self.folder.manifest)

    @property
    def keys(self) -> list[str]:
        """Keys of the samples that are in the dataset, in order."""
        return [prompt.key for prompt in self.run.prompts if prompt.key in self.run.next_tokens]

    @property
    def shards(self) -> list[Path]:
        return [self.folder.shard(entry.name) for entry in self.manifest.shards]

    def bits(self, key: str) -> dict[str, np.ndarray]:
        """What each member of the sample must hold, by array name."""
        return self.run.bits(key)


def make_dataset(root: Path, *, shard_size_bytes: int = 20_480, **run_options: object) -> SyntheticDataset:
    """Make a run in `root`/run and pack it to `root`/dataset; options of the run as in `make_run`.

    Without options: three samples p0, p1, p2 of 5, 12 and 33 tokens, layers 2, 5, 9, width 16, in two shards.
    No card is written.
    """
    run = make_run(root / "run", **run_options)  # type: ignore[arg-type]
    settings = PackSettings(shard_size_bytes=shard_size_bytes, allow_partial=True)
    pack_run(run.root, root / "dataset", settings, Silent())
    return SyntheticDataset(folder=DatasetFolder(root / "dataset"), run=run)
