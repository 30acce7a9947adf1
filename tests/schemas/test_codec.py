"""Records come back as they were, and nothing else comes back at all."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import pytest
from eaglehs.schemas import codec
from eaglehs.schemas.errors import RecordError
from hypothesis import given
from hypothesis import strategies as st


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    weight: float
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    KIND: ClassVar[str] = "test.thing"
    VERSION: ClassVar[int] = 2

    count: int
    is_whole: bool
    colour: Colour
    parts: tuple[Part, ...]
    sizes: dict[str, int]


parts = st.builds(Part, weight=st.floats(allow_nan=False, allow_infinity=False), label=st.none() | st.text(max_size=20))
things = st.builds(
    Thing,
    count=st.integers(-(2**40), 2**40),
    is_whole=st.booleans(),
    colour=st.sampled_from(Colour),
    parts=st.lists(parts, max_size=4).map(tuple),
    sizes=st.dictionaries(st.text(max_size=8), st.integers(), max_size=4),
)


@given(things)
def test_any_record_comes_back_from_its_text(thing: Thing):
    assert codec.loads(Thing, codec.dumps(thing), where="here") == thing
    assert codec.dumps(thing) == codec.dumps(codec.loads(Thing, codec.dumps(thing, indent=2), where="here"))


def stored(**changes: object) -> str:
    thing = Thing(count=1, is_whole=True, colour=Colour.RED, parts=(Part(weight=2.0),), sizes={"a": 1})
    return json.dumps({**json.loads(codec.dumps(thing)), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "test.other"}, "kind 'test.other', expected 'test.thing'"),
        ({"version": 3}, "reads version 2. A newer eaglehs wrote it: pip install -U eaglehs"),
        ({"version": 1}, "reads version 2. Make it anew"),
        ({"version": None}, "version None"),
        ({"colour_of_lid": "red"}, "unknown key 'colour_of_lid'; known keys: colour, count"),
        ({"count": "1"}, "run.json: count: expected int, found '1' (str)"),
        ({"count": True}, "expected int, found 'True' (bool)"),
        ({"is_whole": 1}, "expected bool"),
        ({"colour": "green"}, "expected one of red, blue, found 'green'"),
        ({"parts": {}}, "parts: expected a list"),
        ({"parts": [{"weight": 1.0, "height": 2}]}, "parts[0]: unknown key 'height'"),
        ({"parts": [{}]}, "parts[0]: key 'weight' is missing"),
        ({"sizes": {"a": 1.5}}, "sizes.a: expected int"),
    ],
)
def test_what_is_not_the_record_is_refused_by_name(changes: dict[str, object], message: str):
    with pytest.raises(RecordError) as caught:
        codec.loads(Thing, stored(**changes), where="run.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', stored()[:-5], "[" * 100_000])
def test_a_cut_or_foreign_file_is_refused_with_its_name(text: str, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"run\.json"):
        codec.read_record(Thing, path)


# ------------------------------------------------------------------ a format that grows


@dataclass(frozen=True, slots=True, kw_only=True)
class Lid:
    weight: int
    colour: Colour = field(default=Colour.RED, metadata=codec.since(3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pot:
    KIND: ClassVar[str] = "test.pot"
    VERSION: ClassVar[int] = 3
    OLDEST: ClassVar[int] = 1

    size: int
    lid: Lid | None = None
    handles: int = field(default=0, metadata=codec.since(2))


@pytest.mark.parametrize(
    ("pot", "version"),
    [
        (Pot(size=1), 1),
        (Pot(size=1, lid=Lid(weight=2)), 1),
        (Pot(size=1, handles=2), 2),
        (Pot(size=1, lid=Lid(weight=2, colour=Colour.BLUE)), 3),
        (Pot(size=1, lid=Lid(weight=2, colour=Colour.BLUE), handles=1), 3),
    ],
)
def test_a_record_is_written_in_the_oldest_version_that_has_all_it_holds(pot: Pot, version: int):
    stored = json.loads(codec.dumps(pot))
    assert stored["version"] == version
    assert ("handles" in stored) == (pot.handles != 0)
    assert codec.loads(Pot, codec.dumps(pot), where="here") == pot


def test_a_file_of_an_older_version_reads_as_it_was_written():
    old = {"kind": "test.pot", "version": 1, "size": 4, "lid": None}
    assert codec.decode(Pot, old, where="pot.json") == Pot(size=4)
    assert json.loads(codec.dumps(Pot(size=4))) == old


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1, "handles": 0}, "unknown key 'handles'; known keys: lid, size"),
        ({"version": 0}, "version 0; this eaglehs reads versions 1 to 3. Make it anew"),
        ({"version": 4}, "reads versions 1 to 3. A newer eaglehs wrote it"),
        ({"version": True}, "version True"),
        ({"version": "1"}, "version '1'"),
    ],
)
def test_a_version_or_a_field_that_it_has_not_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(RecordError) as caught:
        codec.decode(Pot, {"kind": "test.pot", "version": 2, "size": 4, **changes}, where="pot.json")
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"absent\.json: can't be read: No such file"):
        codec.read_record(Thing, tmp_path / "absent.json")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="not UTF-8"):
        codec.read_record(Thing, tmp_path / "x.json")


def test_writing_leaves_nothing_beside_the_file(tmp_path):
    thing = codec.loads(Thing, stored(), where="here")
    codec.write_record(tmp_path / "thing.json", thing)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.json"]
    assert codec.read_record(Thing, tmp_path / "thing.json") == thing
