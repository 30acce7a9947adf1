"""The codec: how much smaller states become, and what that costs, beside plain zstd and a copy, in one run.

    python -m bench.codec [--folder DIR] [--rounds 5] [--size 200MB]
    python -m bench.codec --dumps DIR [--rounds 5]

First blocks in memory, one thread: states that the demo's tiny model computed, near-Gaussian ones of width 7168 with
outlier channels, and noise, which nothing makes smaller. Then whole datasets: pack, verify and stream with and without
the codec. GB are of decoded states in all rows, so that a row says how long a dataset of that size takes. With --dumps
blocks of the dumps in a folder, state by state, and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import zstandard
from eaglehs.builder.pack import PackSettings, pack_run
from eaglehs.builder.planes import BLOCK_BYTES, LEVEL, block_checksum, decode_rows, encode_rows
from eaglehs.builder.verify import verify_dataset
from eaglehs.schemas.progress import Silent
from eaglehs.schemas.sizes import format_size, parse_size
from eaglehs.schemas.states import Codec, state_names

import eaglehs
from bench.samples import HIDDEN_SIZE, LAYERS, lengths_of
from bench.table import measure, print_table, ratio_rows
from eaglehs.demo.demo import run_demo
from tests.factories.dumps import make_prompt, write_dumps
from tests.factories.runs import append_ledger, start_run

NUM_OUTLIERS = 16
OUTLIER_SCALE = 50.0
NOISE_BYTES = 50_000_000
SHARD_BYTES = 100_000_000

Ways = dict[str, Callable[[], int]]


def demo_blocks(folder: Path) -> list[np.ndarray]:
    """Return the states of the demo's dataset, uint16 [N, H], each state's rows in blocks of the codec's size."""
    run_demo(folder)
    samples = list(eaglehs.stream(folder / "dataset", staging="arena"))
    names = [name for name in samples[0] if name not in ("key", "input_ids", "loss_mask")]
    whole = [torch.cat([sample[name] for sample in samples]).view(torch.uint16).numpy() for name in names]
    return [block for rows in whole for block in in_blocks(rows)]


def dump_blocks(folder: Path) -> dict[str, list[np.ndarray]]:
    """Return each state's blocks of all dumps in `folder`, uint16 [N, H]; no block holds rows of two dumps."""
    blocks: dict[str, list[np.ndarray]] = {}
    for path in sorted(folder.glob("*.pt")):
        dump = torch.load(path, weights_only=True)
        for name in state_names(tuple(dump["layers"])):
            blocks.setdefault(name, []).extend(in_blocks(dump[name].view(torch.uint16).numpy()))
    return blocks


def gaussian_rows(num_rows: int) -> np.ndarray:
    """Return near-Gaussian states, uint16 [N, H]: channels of their own scales, of which a few are outliers."""
    random = np.random.default_rng(0)
    scales = np.exp(random.normal(0.0, 0.5, HIDDEN_SIZE)).astype(np.float32)
    scales[random.choice(HIDDEN_SIZE, NUM_OUTLIERS, replace=False)] *= OUTLIER_SCALE
    values = random.standard_normal((num_rows, HIDDEN_SIZE), dtype=np.float32) * scales
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def noise_rows(num_rows: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 65536, (num_rows, HIDDEN_SIZE), dtype=np.uint16)


def in_blocks(rows: np.ndarray) -> list[np.ndarray]:
    step = max(BLOCK_BYTES // rows[0].nbytes, 1)
    return [np.ascontiguousarray(rows[start : start + step]) for start in range(0, len(rows), step)]


def block_ways(blocks: Sequence[np.ndarray]) -> tuple[Ways, dict[str, float]]:
    """Return what is measured on blocks, and how many times smaller each way makes them."""
    size_bytes = sum(block.nbytes for block in blocks)
    compressor, decompressor = zstandard.ZstdCompressor(level=LEVEL), zstandard.ZstdDecompressor()
    coded = [bytes(encode_rows(block)) for block in blocks]
    plain = [compressor.compress(block.data) for block in blocks]
    sums = [block_checksum(content) for content in coded]
    outs = [np.empty_like(block) for block in blocks]

    def all_of(work: Iterable[object]) -> int:
        for _ in work:
            pass
        return size_bytes

    def unpack(frame: bytes, out: np.ndarray) -> None:
        with decompressor.stream_reader(frame) as reader:
            assert reader.readinto(out.data.cast("B")) == out.nbytes

    def decode(content: bytes, checksum: int, out: np.ndarray) -> None:
        decode_rows(content, checksum, out, where="bench")

    ways: Ways = {
        "memcpy": lambda: all_of(np.copyto(out, block) for out, block in zip(outs, blocks, strict=True)),
        "planes-zstd, encode": lambda: all_of(block_checksum(encode_rows(block)) for block in blocks),
        "zstd alone, encode": lambda: all_of(compressor.compress(block.data) for block in blocks),
        "planes-zstd, decode": lambda: all_of(map(decode, coded, sums, outs)),
        "zstd alone, decode": lambda: all_of(map(unpack, plain, outs)),
    }
    ratios = {"memcpy": 1.0}
    for name, frames in (("planes-zstd", coded), ("zstd alone", plain)):
        ratio = size_bytes / sum(map(len, frames))
        ratios |= {f"{name}, encode": ratio, f"{name}, decode": ratio}
    for way in ("planes-zstd, decode", "zstd alone, decode"):
        for out in outs:
            out[:] = 0
        ways[way]()
        assert all(map(np.array_equal, outs, blocks)), way
    return ways, ratios


def make_gaussian_run(root: Path, total_bytes: int) -> Path:
    """Write a finished run of near-Gaussian states."""
    prompts = [make_prompt(f"p{number}", length) for number, length in enumerate(lengths_of(total_bytes))]
    run = start_run(root, prompts, layers=LAYERS, hidden_size=HIDDEN_SIZE)
    pool = torch.from_numpy(gaussian_rows(max(prompt.num_tokens for prompt in prompts) + 8)).view(torch.bfloat16)
    for prompt in prompts:
        states = {name: pool[place : place + prompt.num_tokens] for place, name in enumerate(state_names(LAYERS))}
        paths = write_dumps(run.folder.dump_path(prompt.key, "x").parent, prompt, states)
        append_ledger(run, prompt, dumps=paths, next_token=1)
    return root


def dataset_ways(root: Path, run: Path) -> tuple[Ways, dict[str, float]]:
    """Return what is measured on whole datasets, and how many times smaller each is than the plain one."""
    sizes = {codec: pack_to(run, root / codec, codec) for codec in Codec}
    plain_bytes = sizes[Codec.PLAIN]

    def pack(codec: Codec) -> int:
        with tempfile.TemporaryDirectory(dir=root) as out:
            pack_to(run, Path(out), codec)
        return plain_bytes

    def verify(codec: Codec) -> int:
        assert verify_dataset(root / codec).is_good
        return plain_bytes

    def stream(codec: Codec) -> int:
        num_samples = sum(1 for _ in eaglehs.stream(root / codec))
        assert num_samples == len(dumps), num_samples
        return plain_bytes

    dumps = list((run / "dumps").glob("*/*.pt"))  # one a sample
    ways: Ways = {
        f"{work.__name__}, {codec}": partial(work, codec) for work in (pack, verify, stream) for codec in Codec
    }
    return ways, {name: plain_bytes / sizes[Codec(name.partition(", ")[2])] for name in ways}


def pack_to(run: Path, out: Path, codec: Codec) -> int:
    """Pack the run; return the bytes of the shards."""
    summary = pack_run(run, out, PackSettings(shard_size_bytes=SHARD_BYTES, codec=codec), Silent())
    assert not summary.set_aside, summary.set_aside
    return summary.totals.size_bytes


def show_blocks(title: str, blocks: Sequence[np.ndarray], rounds: int) -> None:
    size, width = format_size(sum(block.nbytes for block in blocks)), blocks[0].shape[1]
    show(f"{title}: {size} of width {width}, one thread", block_ways(blocks), rounds, "memcpy")


def show(title: str, found: tuple[Ways, dict[str, float]], rounds: int, base: str) -> None:
    ways, ratios = found
    rows = ratio_rows(measure(ways, rounds), base)
    columns = ("way", "smaller", "GB/s", f"of {base}", "spread", "CPU s/GB")
    print_table(title, columns, [[row[0], f"{ratios[row[0]]:.3f}", *row[1:]] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on which disk; all that is written there is removed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=parse_size, default=200_000_000, help="bytes of made-up states")
    parser.add_argument("--dumps", type=Path, help="measure the states of the dumps in this folder, and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.dumps:
        for name, blocks in dump_blocks(given.dumps).items():
            show_blocks(f"{name} of {given.dumps.name}", blocks, given.rounds)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        root = Path(name)
        for title, blocks in (
            ("States of the demo's model", demo_blocks(root / "demo")),
            ("Near-Gaussian states with outlier channels", in_blocks(gaussian_rows(given.size // (2 * HIDDEN_SIZE)))),
            ("Noise", in_blocks(noise_rows(NOISE_BYTES // (2 * HIDDEN_SIZE)))),
        ):
            show_blocks(title, blocks, given.rounds)
        run = make_gaussian_run(root / "run", given.size)
        show("Datasets of near-Gaussian states, one worker", dataset_ways(root, run), given.rounds, "pack, plain")


if __name__ == "__main__":
    main()
