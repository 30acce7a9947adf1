"""Reading dumps: offsets that are the arrays' bytes, and a named error for every file that is not what it should be."""

import io
import random
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from eaglehs.builder.dump_reader import DumpRowsError, DumpSchemaError, read_dump
from eaglehs.builder.dump_zip import DumpError, DumpTypeError, DumpUnreadableError
from eaglehs.builder.plan import DatasetLayout
from eaglehs.schemas.counts import counted
from eaglehs.schemas.dump import DumpNameError
from eaglehs.schemas.errors import DataError

from tests.factories.dumps import HIDDEN_SIZE, LAYERS, make_prompt, make_states, write_dumps

LAYOUT = DatasetLayout(layers=LAYERS, hidden_size=HIDDEN_SIZE)
T = 40


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write_dumps(tmp_path, make_prompt("p0", T), make_states("p0", T))[0]


def content_of(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def resave(path: Path, **changes: object) -> Path:
    """Save the dump anew with other values; None removes a key."""
    content = content_of(path) | changes
    torch.save({key: value for key, value in content.items() if value is not None}, path)
    return path


def rewrite_zip(path: Path, change=lambda name, data: data, **options: object) -> Path:
    """Write the file's records anew, each passed through `change`; a record that becomes None is left out."""
    with zipfile.ZipFile(path) as old:
        records = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", **options) as new:
        for name, data in records:
            changed = change(name, data)
            if changed is not None:
                new.writestr(name, changed)
    return path


def test_each_range_holds_the_bytes_of_its_array(tmp_path: Path):
    states = make_states("p0", T)
    for path in write_dumps(tmp_path, make_prompt("p0", T), states, bounds=(0, 16, 39, T)):
        dump, raw = read_dump(path, LAYOUT), path.read_bytes()
        rows = slice(dump.name.start, dump.name.end)
        for name, state in states.items():
            place = dump.arrays[name]
            wanted = state[rows].contiguous().view(torch.uint16).numpy().tobytes()
            assert raw[place.offset : place.offset + place.length] == wanted
        place = dump.arrays["input_ids"]
        ids = np.frombuffer(raw, "<i4", dump.name.num_rows, place.offset)
        assert ids.tolist() == make_prompt("p0", T).input_ids[rows].tolist()
        assert (dump.request.key, dump.prompt_tokens, dump.size_bytes) == ("p0", T, len(raw))


def test_a_file_cut_anywhere_is_refused_with_its_name(dump: Path):
    whole = dump.read_bytes()
    cuts = [0, 10, len(whole) // 2, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 60)]
    for cut in cuts:
        dump.write_bytes(whole[:cut])
        with pytest.raises(DumpUnreadableError, match=re.escape(str(dump))) as caught:
            read_dump(dump, LAYOUT)
        assert counted(cut, "byte") in str(caught.value)


def test_a_damaged_file_gives_an_error_of_ours_or_the_same_places(dump: Path):
    whole, right = dump.read_bytes(), read_dump(dump, LAYOUT)
    dice = random.Random(1)
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(dice.choice((1, 1, 4))):
            damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        dump.write_bytes(damaged)
        try:
            found = read_dump(dump, LAYOUT)
        except DataError:
            continue
        assert sorted(found.arrays) == sorted(right.arrays)
        assert {place.length for place in found.arrays.values()} == {place.length for place in right.arrays.values()}


class Custom:
    """Something of the writer's own."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.float32(3), "numpy"),
        (np.arange(3), "numpy"),
        (Path("x"), "pathlib"),
        (Custom(), "Custom"),
        (io.BytesIO, "io.BytesIO"),
    ],
)
def test_a_foreign_type_is_never_loaded_and_its_key_is_named(dump: Path, value, name):
    with pytest.raises(DumpTypeError, match=f"key 'prompt_tokens' holds a .*{name}"):
        read_dump(resave(dump, prompt_tokens=value), LAYOUT)


def test_code_in_a_pickle_does_not_run(dump: Path, tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was-here",)

    with pytest.raises(DumpTypeError):
        read_dump(resave(dump, rid=Evil()), LAYOUT)
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize("value", [{1, 2}, torch.bfloat16, torch.Size([1])])
def test_plain_types_that_no_dump_has_are_refused_by_the_schema(dump: Path, value):
    with pytest.raises(DumpError, match=r"holds a|is unknown"):
        read_dump(resave(dump, extra=value), LAYOUT)


def test_tensors_saved_from_a_gpu_are_read_without_one(dump: Path):
    before = read_dump(dump, LAYOUT)

    def tag(name: str, data: bytes) -> bytes:
        on_gpu = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1")
        return on_gpu if name.endswith("data.pkl") else data

    rewrite_zip(dump, tag)
    assert b"cuda:1" in dump.read_bytes()
    found = read_dump(dump, LAYOUT)
    raw = dump.read_bytes()
    state = make_states("p0", T)["final"].view(torch.uint16).numpy().tobytes()
    place = found.arrays["final"]
    assert raw[place.offset : place.offset + place.length] == state
    assert found.name == before.name


def test_a_compressed_file_is_refused(dump: Path):
    with pytest.raises(DumpUnreadableError, match="compressed"):
        read_dump(rewrite_zip(dump, compression=zipfile.ZIP_DEFLATED), LAYOUT)


def test_an_encrypted_record_is_refused(dump: Path):
    raw = bytearray(dump.read_bytes())
    entry = raw.index(b"PK\x01\x02")
    raw[entry + 8] |= 1
    dump.write_bytes(raw)
    with pytest.raises(DumpUnreadableError, match="encrypted"):
        read_dump(dump, LAYOUT)


def test_big_endian_numbers_are_refused(dump: Path):
    with pytest.raises(DumpUnreadableError, match="big-endian"):
        read_dump(rewrite_zip(dump, lambda name, data: b"big" if name.endswith("byteorder") else data), LAYOUT)


def test_foreign_records_are_refused(dump: Path):
    with zipfile.ZipFile(dump, "a") as archive:
        archive.writestr("archive/code/evil.py", b"print()")
    with pytest.raises(DumpUnreadableError, match=r"evil\.py"):
        read_dump(dump, LAYOUT)


def test_a_storage_that_no_tensor_owns_is_refused(dump: Path):
    with zipfile.ZipFile(dump, "a") as archive:
        prefix = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{prefix}/data/77", bytes(64))
    with pytest.raises(DumpUnreadableError, match="do not fit"):
        read_dump(dump, LAYOUT)


def test_overlapping_records_are_refused(dump: Path):
    raw = bytearray(dump.read_bytes())
    entries = [match.start() for match in re.finditer(b"PK\x01\x02", raw)]
    named = {bytes(raw[e + 46 : e + 46 + raw[e + 28]]).partition(b"/")[2]: e for e in entries}
    one, other = named[b"data/1"], named[b"data/2"]
    raw[other + 42 : other + 46] = raw[one + 42 : one + 46]
    dump.write_bytes(raw)
    with pytest.raises(DumpUnreadableError):
        read_dump(dump, LAYOUT)


def test_other_zip_and_pickle_files_are_refused(dump: Path):
    with zipfile.ZipFile(dump, "w") as archive:
        archive.writestr("x/version", b"3")
    with pytest.raises(DumpUnreadableError, match=r"no data\.pkl"):
        read_dump(dump, LAYOUT)
    torch.save({"a": 1}, dump, _use_new_zipfile_serialization=False)
    with pytest.raises(DumpUnreadableError, match="not a whole dump"):
        read_dump(dump, LAYOUT)
    torch.save([1, 2], dump)
    with pytest.raises(DumpSchemaError, match="holds a list"):
        read_dump(dump, LAYOUT)


def test_a_missing_file_is_refused_by_name(dump: Path):
    dump.unlink()
    with pytest.raises(DumpUnreadableError, match="is not there"):
        read_dump(dump, LAYOUT)


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"version": True}, "version is a bool"),
        ({"kind": "other.dump"}, "eaglehs import"),
        ({"final": None}, "'final' is missing"),
        ({"layer_31": torch.ones(T, HIDDEN_SIZE, dtype=BF16)}, "'layer_31' is unknown"),
        ({"final": None, "final_states": torch.ones(T, HIDDEN_SIZE, dtype=BF16)}, "'final' is missing"),
        ({"layers": [2, 5, 8]}, r"layers is \[2, 5, 8\], but the run has \[2, 5, 9\]"),
        ({"layers": (2, 5, 9)}, "layers is a tuple"),
        ({"capture": "layer_output"}, "capture is 'layer_output'"),
        ({"start": 1}, "start is 1, but the file's name says 0"),
        ({"rid": "eh-0123abcd-p1-0"}, "the file's name says 'eh-0123abcd-p0-0'"),
        ({"prompt_tokens": 2.0}, "prompt_tokens is a float"),
        ({"final": torch.ones(T, HIDDEN_SIZE, dtype=torch.float16)}, "torch.float16"),
        ({"input_ids": torch.ones(T, dtype=torch.int64)}, "torch.int64"),
        ({"final": [1, 2]}, "final is a list"),
        ({"final": torch.ones(HIDDEN_SIZE, T, dtype=BF16)}, "axes in another order"),
        ({"final": torch.ones(T, 2 * HIDDEN_SIZE, dtype=BF16)}, r"shape \[40, 32\], expected \[40, 16\]"),
        ({"final": torch.ones(3, T, HIDDEN_SIZE, dtype=BF16)}, "axes in another order"),
        ({"final": torch.ones(T, 3, HIDDEN_SIZE, dtype=BF16)}, "axes in another order"),
        ({"final": torch.ones(HIDDEN_SIZE, T, dtype=BF16).T}, "not in C order"),
    ],
)
def test_a_dump_that_is_not_of_the_schema_is_refused_with_the_difference(dump: Path, changes, message):
    with pytest.raises(DumpSchemaError, match=message):
        read_dump(resave(dump, **changes), LAYOUT)


def test_fewer_rows_than_ids_name_the_missing_rows_and_the_prefix_cache(dump: Path):
    states = {name: state[32:].clone() for name, state in make_states("p0", T).items()}
    with pytest.raises(DumpRowsError, match=r"32 rows are missing.*prefix cache.*--disable-radix-cache"):
        read_dump(resave(dump, **states), LAYOUT)


def test_more_rows_than_ids_are_refused_and_never_cut(dump: Path):
    states = {name: torch.cat((state, state[:24])) for name, state in make_states("p0", T).items()}
    with pytest.raises(DumpRowsError, match="24 rows too many"):
        read_dump(resave(dump, **states), LAYOUT)


def test_states_that_share_their_bytes_are_refused(dump: Path):
    state = make_states("p0", T)["final"]
    with pytest.raises(DumpSchemaError, match="are the same bytes"):
        read_dump(resave(dump, layer_2=state, layer_5=state), LAYOUT)


def test_views_of_larger_tensors_are_read_by_shape_and_called_bloated(dump: Path):
    big = {name: torch.randn(8192, HIDDEN_SIZE).to(BF16) for name in make_states("p0", T)}
    found = read_dump(resave(dump, **{name: tensor[100 : 100 + T] for name, tensor in big.items()}), LAYOUT)
    assert found.is_bloated
    assert found.content_bytes == T * (4 + 4 * 2 * HIDDEN_SIZE)
    raw, place = dump.read_bytes(), found.arrays["final"]
    wanted = big["final"][100 : 100 + T].view(torch.uint16).numpy().tobytes()
    assert raw[place.offset : place.offset + place.length] == wanted


def test_a_name_that_is_no_dumps_is_refused(dump: Path):
    with pytest.raises(DumpNameError):
        read_dump(dump.rename(dump.with_name("x.pt")), LAYOUT)
