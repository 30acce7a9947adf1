"""Packed datasets with a card, whose states any cast would change: what each reader must give back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from eaglehs.builder.decode import DecodedSample
from eaglehs.builder.stream import HiddenStateStream
from eaglehs.cards.write import write_card
from eaglehs.schemas.manifest import DatasetFolder
from torch.utils.data import DataLoader

from tests.factories.bits import bits_of, hostile_states
from tests.factories.datasets import SyntheticDataset
from tests.factories.packing import pack_by_hand
from tests.factories.runs import SyntheticRun, make_run

LENGTHS = (5, 12, 33, 2, 7, 21, 1, 16)


def make_readable(
    root: Path, *, shard_size_bytes: int = 20_480, ids: Mapping[str, str] | None = None, **run_options: object
) -> SyntheticDataset:
    """Make a dataset of 8 samples in 4 shards under `root`/dataset, with its card.

    Keys are p0 .. p7; `ids` gives the users' ids of keys; options of the run as in `make_run`.
    """
    run = make_run(root / "run", **({"lengths": LENGTHS} | run_options))  # type: ignore[arg-type]
    run.prompts = [replace(prompt, id=(ids or {}).get(prompt.key, prompt.id)) for prompt in run.prompts]
    run.bits = _hostile(run)  # type: ignore[method-assign]
    pack_by_hand(run, root / "dataset", shard_size_bytes)
    write_card(root / "dataset")
    return SyntheticDataset(folder=DatasetFolder(root / "dataset"), run=run)


def keys_of(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of decoded samples in the order in which they come."""
    return [sample["key"] for sample in samples]


def load(samples: HiddenStateStream, num_workers: int, **options: Any) -> DataLoader:
    """Read a stream through a DataLoader that does not batch."""
    return DataLoader(samples, batch_size=None, num_workers=num_workers, **options)


def assert_same_sample(sample: DecodedSample, dataset: SyntheticDataset, key: str) -> None:
    """Hold a decoded sample against what was packed: keys, dtypes and every bit."""
    expected = dataset.bits(key)
    assert sample["key"] == key
    assert list(sample) == ["key", *expected]
    np.testing.assert_array_equal(sample["input_ids"].numpy(), expected["input_ids"][:, 0])
    np.testing.assert_array_equal(sample["loss_mask"].numpy(), expected["loss_mask"][:, 0])
    for name in list(expected)[2:]:
        np.testing.assert_array_equal(bits_of(sample[name]), expected[name], err_msg=f"{key} {name}")


def assert_all_samples(samples: list[DecodedSample], dataset: SyntheticDataset) -> None:
    """Hold samples in any order against the dataset: each once, every bit right."""
    assert sorted(sample["key"] for sample in samples) == sorted(dataset.keys)
    for sample in samples:
        assert_same_sample(sample, dataset, sample["key"])


def _hostile(run: SyntheticRun) -> Callable[[str], dict[str, np.ndarray]]:
    plain = type(run).bits

    def bits(key: str) -> dict[str, np.ndarray]:
        arrays = plain(run, key)
        for number, name in enumerate(list(arrays)[2:]):
            arrays[name] = hostile_states(*arrays[name].shape, seed=100 * run.prompts.index(run.prompt(key)) + number)
        return arrays

    return bits
