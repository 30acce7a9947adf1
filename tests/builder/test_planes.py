"""Rows to blocks and back: any bits, every way of reading, every cut and every flipped bit."""

import io
from pathlib import Path

import numpy as np
import pytest
from eaglehs.builder import shard_coder
from eaglehs.builder.planes import CodedBlockError, decode_rows, encode_rows
from eaglehs.builder.planes import block_checksum as checksum_of
from eaglehs.builder.planes_read import CodedRows, PlanesFeed, decode_member, file_state
from eaglehs.builder.shard_coder import write_state
from eaglehs.builder.tar_writer import FileRange
from eaglehs.schemas.errors import DataError
from eaglehs.schemas.index import ArrayPlace, CodedForm, IndexRow
from eaglehs.schemas.planes import PlanesHead, PlanesHeadError, read_head, write_head
from eaglehs.schemas.states import Codec, array_specs
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.bits import hostile_states
from tests.factories.coded import small_blocks

KINDS = ("noise", "one value", "equal rows", "signed zeros", "subnormals", "near gaussian", "hostile")


def states_of(kind: str, num_rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Return uint16 [T, H] of a kind."""
    random = np.random.default_rng(seed)
    gaussian = random.standard_normal((num_rows, width), dtype=np.float32)
    made = {
        "noise": random.integers(0, 65536, (num_rows, width)),
        "one value": np.full((num_rows, width), 0x3F80),
        "equal rows": np.repeat(random.integers(0, 65536, (1, width)), num_rows, axis=0),
        "signed zeros": random.integers(0, 2, (num_rows, width)) << 15,
        "subnormals": random.integers(0, 128, (num_rows, width)),
        "near gaussian": gaussian.view(np.uint32) >> 16,
        "hostile": hostile_states(num_rows, width, seed),
    }
    return made[kind].astype("<u2")


def write_member(path: Path, rows_TH: np.ndarray, block_bytes: int) -> tuple[IndexRow, str]:
    """Write rows as a coded member that begins 7 bytes into the file; return its row of an index, and its hash."""
    num_rows, width = rows_TH.shape
    spec = array_specs((2,), width, Codec.PLANES_ZSTD)[-1]
    plain = path.with_name("plain")
    plain.write_bytes(b"head" + rows_TH.tobytes())
    with plain.open("rb") as source, path.open("w+b") as out, small_blocks(block_bytes):
        whole = FileRange(path=plain, handle=source.fileno(), offset=4, length=rows_TH.nbytes)
        length, found = write_state(whole, out.fileno(), 7, spec)
    form = CodedForm(codec=Codec.PLANES_ZSTD, length=length, dtype="<u2", width=width)
    place = ArrayPlace(offset=7, length=rows_TH.nbytes, xxh3_128=found, coded=form)
    row = IndexRow(
        shard="s.tar",
        key="p0",
        id="p0",
        source="",
        num_tokens=num_rows,
        num_trainable=0,
        next_token=-1,
        arrays={"final": place},
    )
    return row, found


@given(
    kind=st.sampled_from(KINDS),
    num_rows=st.integers(1, 40),
    width=st.integers(1, 40),
    block_bytes=st.sampled_from([1, 64, 300, 10**6]),
    bounds=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    piece=st.integers(1, 500),
    threads=st.integers(1, 3),
)
@settings(max_examples=150)
def test_any_rows_come_back_bit_for_bit_in_every_way(
    tmp_path_factory, kind, num_rows, width, block_bytes, bounds, piece, threads
):
    rows_TH = states_of(kind, num_rows, width)
    path = tmp_path_factory.mktemp("member") / "member"
    row, _ = write_member(path, rows_TH, block_bytes)
    content = path.read_bytes()[7:]
    assert len(content) == row.arrays["final"].stored_bytes <= 128 + rows_TH.nbytes
    np.testing.assert_array_equal(decode_member(content, where="x", threads=threads), rows_TH)

    taken: list[np.ndarray] = []
    feed = PlanesFeed(row, "final", lambda block: taken.append(block.copy()), where="x")
    for start in range(0, len(content), piece):
        feed.update(memoryview(content)[start : start + piece])
    assert feed.end() is None
    np.testing.assert_array_equal(np.concatenate(taken), rows_TH)

    start, end = min(bounds[0], num_rows - 1), min(max(bounds), num_rows)
    start = min(start, end - 1)
    with path.open("rb") as file:
        state = file_state(path, file.fileno(), row, "final")
        out = bytearray((end - start) * state.row_bytes)
        state.read_rows(start, end, memoryview(out))
        assert bytes(out) == rows_TH[start:end].tobytes()
        parts = bytearray(end * state.row_bytes)
        for task in reversed(state.tasks(end, memoryview(parts))):
            task()
        assert bytes(parts) == rows_TH[:end].tobytes()
        blocks = [bytes(block) for _, block in CodedRows(state, num_rows).blocks()]
        assert b"".join(blocks) == rows_TH.tobytes()


def test_noise_under_a_long_table_becomes_a_few_blocks_as_they_are(tmp_path: Path):
    """A coded member is never larger than the plain one, or shards would outgrow what was planned."""
    rows_TH = states_of("noise", 200, 16)
    row, _ = write_member(tmp_path / "member", rows_TH, 64)
    content = (tmp_path / "member").read_bytes()[7:]
    head = read_head(content, where="x")
    assert 1 < len(head.blocks) <= 12
    assert head.head_bytes <= 128
    assert content[head.head_bytes :] == rows_TH.tobytes()
    assert row.arrays["final"].stored_bytes == len(content)


def test_states_of_a_model_shrink_and_so_do_rows_that_are_alike(tmp_path: Path):
    sizes = {}
    for kind in ("near gaussian", "equal rows", "one value"):
        row, _ = write_member(tmp_path / "member", states_of(kind, 300, 512), 10**6)
        sizes[kind] = 300 * 512 * 2 / row.arrays["final"].stored_bytes
    assert sizes["near gaussian"] > 1.3
    assert sizes["equal rows"] > 20
    assert sizes["one value"] > 1000


def test_a_block_that_was_written_by_hand_from_the_format_text_is_read():
    """Ten values 1.0, 0x3F80: a zstd frame of two runs (RFC 8878), without a compressor."""
    frame = (
        bytes([0x28, 0xB5, 0x2F, 0xFD])  # zstd
        + bytes([0x20, 20])  # one segment, whose content has 20 bytes
        + (10 << 3 | 1 << 1 | 0).to_bytes(3, "little")  # a run of 10, more follow
        + bytes([0x3F])
        + (10 << 3 | 1 << 1 | 1).to_bytes(3, "little")  # a run of 10, the last
        + bytes([0x80])
    )
    rows = np.empty((2, 5), dtype="<u2")
    decode_rows(frame, checksum_of(frame), rows, where="x")
    assert rows.tolist() == [[0x3F80] * 5] * 2


@pytest.mark.parametrize("kind", ["near gaussian", "noise"])
def test_every_flipped_bit_of_a_member_is_found_by_every_reader(tmp_path: Path, kind: str):
    rows_TH = states_of(kind, 30, 8)
    path = tmp_path / "member"
    row, _ = write_member(path, rows_TH, 128)
    whole = path.read_bytes()
    for place in range(7, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises((PlanesHeadError, CodedBlockError)):
            decode_member(bytes(damaged[7:]), where="x")
        feed = PlanesFeed(row, "final", lambda block: None, where="x")
        feed.update(memoryview(damaged)[7:])
        assert isinstance(feed.end(), DataError)
        with path.open("rb") as file, pytest.raises((PlanesHeadError, CodedBlockError)):
            state = file_state(path, file.fileno(), row, "final")
            state.read_rows(0, 30, memoryview(bytearray(rows_TH.nbytes)))


def test_a_member_that_is_cut_anywhere_is_refused(tmp_path: Path):
    rows_TH = states_of("near gaussian", 30, 8)
    row, _ = write_member(tmp_path / "member", rows_TH, 128)
    content = (tmp_path / "member").read_bytes()[7:]
    for length in range(len(content)):
        with pytest.raises(PlanesHeadError):
            decode_member(content[:length], where="x")
        feed = PlanesFeed(row, "final", lambda block: None, where="x")
        feed.update(memoryview(content)[:length])
        assert isinstance(feed.end(), PlanesHeadError)
    with pytest.raises(PlanesHeadError):
        decode_member(content + b"\0", where="x")


def test_a_damaged_block_is_named_with_its_rows(tmp_path: Path):
    rows_TH = states_of("near gaussian", 30, 8)
    row, _ = write_member(tmp_path / "member", rows_TH, 128)
    content = bytearray((tmp_path / "member").read_bytes()[7:])
    third = list(read_head(bytes(content), where="x").placed())[2]
    content[third.offset + 3] ^= 1
    with pytest.raises(CodedBlockError, match=r"final of sample p0: block 2 \(rows 16 to 23\): its bytes have the"):
        decode_member(bytes(content), where="final of sample p0")
    (tmp_path / "member").write_bytes(b"seventh" + content)
    with (tmp_path / "member").open("rb") as file:
        state = file_state(tmp_path / "member", file.fileno(), row, "final")
        out = memoryview(bytearray(16 * 16))
        state.read_rows(0, 16, out)  # the blocks before it are whole
        with pytest.raises(CodedBlockError, match=r"member: final of sample p0: block 2 \(rows 16 to 23\)"):
            state.read_rows(15, 17, out[:32])


@pytest.mark.parametrize("content", [b"no frame at all", b""])
def test_a_block_with_the_right_checksum_and_no_frame_is_refused(content: bytes):
    with pytest.raises(CodedBlockError, match="block 0: "):
        decode_rows(content, checksum_of(content), np.empty((4, 8), dtype="<u2"), where="block 0")


def test_a_frame_of_other_rows_is_refused_before_it_is_unpacked():
    frame = encode_rows(np.zeros((1000, 100), dtype="<u2"))
    assert len(frame) < 100
    with pytest.raises(CodedBlockError, match="its frame is of 200,000 bytes, its rows have 200"):
        decode_rows(frame, checksum_of(frame), np.empty((1, 100), dtype="<u2"), where="x")


def test_equal_rows_give_equal_bytes_whatever_was_coded_before():
    rows = states_of("near gaussian", 50, 64)
    first = bytes(encode_rows(rows))
    encode_rows(states_of("noise", 7, 5))
    assert bytes(encode_rows(rows)) == first


def test_a_head_of_another_array_is_refused(tmp_path: Path):
    row, _ = write_member(tmp_path / "member", states_of("near gaussian", 30, 8), 128)
    other, _ = write_member(tmp_path / "other", states_of("near gaussian", 31, 8), 128)
    assert row.arrays["final"].coded != other.arrays["final"].coded
    with (tmp_path / "other").open("rb") as file:
        state = file_state(tmp_path / "other", file.fileno(), row, "final")
        with pytest.raises(PlanesHeadError, match=r"31 rows of width 8 in .* by its head, 30 of 8 in"):
            state.head()


def test_blocks_are_of_about_two_mebibytes(tmp_path: Path):
    rows_TH = states_of("near gaussian", 300, 7168)
    write_member(tmp_path / "member", rows_TH, shard_coder.STATE_BLOCK_BYTES)
    head = read_head(io.BytesIO((tmp_path / "member").read_bytes()[7:]).read(4096), where="x")
    assert (head.block_rows, len(head.blocks)) == (146, 3)
    assert write_head(head) == (tmp_path / "member").read_bytes()[7 : 7 + head.head_bytes]
    assert isinstance(head, PlanesHead)
