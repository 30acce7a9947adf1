"""Keys are safe everywhere and never fall together."""

import re

import pytest
from eaglehs.schemas.dump import DumpName, DumpNameError, RequestId
from eaglehs.schemas.keys import fan_out, is_key, make_key, shown_id
from hypothesis import given
from hypothesis import strategies as st

HOSTILE = [
    "req.0",
    "req.1",
    "chatcmpl-1.5/abc",
    "a b",
    "x" * 300,
    "../evil",
    "__index__",
    ".hidden",
    "Ä",
    "日本",
    "",
    "A",
    "a",
]


@pytest.mark.parametrize("sample_id", HOSTILE)
def test_a_key_is_safe_as_file_name_member_name_and_request_id(sample_id: str):
    key = make_key(sample_id)
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", key)
    rid = RequestId(run="0123abcd", key=key, attempt=7)
    assert RequestId.parse(str(rid)) == rid


def test_hostile_ids_get_different_keys():
    assert len({make_key(sample_id) for sample_id in HOSTILE}) == len(HOSTILE)


@given(st.text(), st.text())
def test_two_ids_never_share_a_key(one: str, other: str):
    assert (make_key(one) == make_key(other)) == (one == other)


@given(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True))
def test_a_safe_id_is_its_own_key(sample_id: str):
    assert make_key(sample_id) == sample_id
    assert re.fullmatch("[0-9a-f]{2}", fan_out(sample_id))


@given(st.text(max_size=80))
def test_what_is_no_key_is_told(text: str):
    assert is_key(text) == bool(re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text))


@pytest.mark.parametrize(
    "text",
    [
        "../evil",
        "eh-",
        "eh-ab-../x-0",
        "eh-ab-x",
        "HEALTH_CHECK_1",
        "eh-ab-x-0/y",
        "eh-AB-x-0",
        "eh-ab-x.y-0",
        "eh-ab-x-0\n",
    ],
)
def test_a_foreign_request_id_is_refused(text: str):
    with pytest.raises(DumpNameError):
        RequestId.parse(text)


@given(
    st.from_regex(r"eh-[a-z0-9]{1,8}-[a-z0-9][a-z0-9_-]{0,20}-[0-9]{1,3}", fullmatch=True),
    st.integers(0, 2**31),
    st.integers(1, 2**20),
)
def test_a_dump_name_comes_back_from_the_file_name(rid: str, start: int, num_rows: int):
    name = DumpName(rid=rid, start=start, end=start + num_rows)
    assert DumpName.parse(name.filename) == name
    assert name.num_rows == num_rows


@pytest.mark.parametrize(
    "filename",
    [
        "x.pt",
        "eh-a-b-0.pt",
        "eh-a-b-0.000000-000000.pt",
        "eh-a-b-0.000005-000002.pt",
        ".eh-a-b-0.000000-000001.pt.1.part",
    ],
)
def test_a_foreign_file_name_is_refused(filename: str):
    with pytest.raises(DumpNameError):
        DumpName.parse(filename)


@pytest.mark.parametrize(
    ("sample_id", "shown"),
    [
        ("q17", "q17"),
        ("日本 é", "日本 é"),
        ("a\nb\x1b[2J\0", r"a\nb\x1b[2J\x00"),
        ("x\u202ey", r"x\u202ey"),
        ("x" * 5000, "x" * 100 + "... (5,000 characters)"),
    ],
    ids=["plain", "letters", "control", "direction", "long"],
)
def test_an_id_is_shown_on_one_line_and_can_not_steer_the_terminal(sample_id: str, shown: str):
    assert shown_id(sample_id) == shown
