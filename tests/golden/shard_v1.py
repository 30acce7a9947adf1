"""Makes shard_v1.tar from the text of the format alone (schemas/states.py, schemas/sample.py), without builder/.

    python -m tests.golden.shard_v1

The file may be remade only together with a new format version and a `Format` line in CHANGELOG.md.
"""

import io
import json
from pathlib import Path

import numpy as np
import xxhash

PATH = Path(__file__).with_name("shard_v1.tar")
LAYERS, WIDTH = (1, 3), 4
SAMPLES = (
    {"key": "first", "id": "first", "source": "golden.jsonl:0", "ids": [7, 8, 9], "mask": [0, 1, 1], "next": 5},
    {"key": "second-1d1e11d7af", "id": "Second", "source": "golden.jsonl:1", "ids": [4], "mask": [1], "next": -1},
)


def state_bits(sample: int, state: int, num_tokens: int) -> np.ndarray:
    """bfloat16 patterns of 1.0 and up, other ones for every value."""
    first = 0x3F80 + 64 * sample + 16 * state
    return np.arange(first, first + num_tokens * WIDTH, dtype="<u2").reshape(num_tokens, WIDTH)


def arrays_of(number: int) -> dict[str, np.ndarray]:
    sample = SAMPLES[number]
    num_tokens = len(sample["ids"])
    return {
        "input_ids.npy": np.array(sample["ids"], "<i4").reshape(-1, 1),
        "loss_mask.npy": np.array(sample["mask"], "|u1").reshape(-1, 1),
        "layer_1.bf16.npy": state_bits(number, 0, num_tokens),
        "layer_3.bf16.npy": state_bits(number, 1, num_tokens),
        "final.bf16.npy": state_bits(number, 2, num_tokens),
    }


def meta_of(number: int) -> bytes:
    sample = SAMPLES[number]
    hashes = {
        member.removesuffix(".npy").removesuffix(".bf16"): xxhash.xxh3_128_hexdigest(array.tobytes())
        for member, array in arrays_of(number).items()
    }
    record = {
        "kind": "eaglehs.sample",
        "version": 1,
        "key": sample["key"],
        "id": sample["id"],
        "source": sample["source"],
        "num_tokens": len(sample["ids"]),
        "num_trainable": sum(sample["mask"]),
        "next_token": sample["next"],
        "xxh3_128": hashes,
    }
    text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    assert 256 < len(text) < 512 - 20, "one block holds it, with the widest numbers as well"
    return text.ljust(511) + b"\n"


def npy_bytes(array: np.ndarray) -> bytes:
    """What numpy itself writes."""
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=(1, 0))
    return out.getvalue()


def header_bytes(name: str, size: int) -> bytes:
    """512 bytes: POSIX.1-1988, field by field."""
    fields = [
        name.encode().ljust(100, b"\0"),
        *(b"0000644\0", b"0000000\0", b"0000000\0"),  # mode, owner, group
        b"%011o\0" % size,
        b"00000000000\0",  # modified: 1970
        b" " * 8,  # checksum: blanks while it is summed
        b"0",  # a plain file
        bytes(100),  # link
        b"ustar\x00" + b"00",
        bytes(32),  # owner and group have no names
        bytes(32),
        *(b"0000000\0", b"0000000\0"),  # device
        bytes(155 + 12),
    ]
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def build() -> bytes:
    out = b""
    for number, sample in enumerate(SAMPLES):
        contents = {"meta.json": meta_of(number)}
        contents |= {member: npy_bytes(array) for member, array in arrays_of(number).items()}
        for member, content in contents.items():
            out += header_bytes(f"{sample['key']}.{member}", len(content)) + content
            out += bytes(-len(out) % 512)
    out += bytes(1024)
    return out + bytes(-len(out) % 10240)


if __name__ == "__main__":
    PATH.write_bytes(build())
