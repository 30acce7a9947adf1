"""Records to JSON and back: strict, typed, versioned.

A stored record is a frozen dataclass. A top-level one carries `KIND` and `VERSION` class variables, which stand in
the file as `kind` and `version`. Reading refuses another kind, another version, an unknown key, a missing key and a
value of another type, each by name: a format never drifts unseen. JSON is written with sorted keys, so that the same
record is the same bytes.

A format that grows keeps its old files: a class that reads older versions says the first of them as `OLDEST`, and marks
each later field with `since(version)`. Such a field is left out where it has its default, and a record is written in
the oldest version that has all that it holds, so what could be said before is the same bytes as before.

Fields may be str, int, float, bool, `X | None`, StrEnum, tuple[X, ...], dict[str, X] and other records.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from .atomic import write_atomically
from .errors import RecordError
from .json_text import parse_json
from .quick_codec import SINCE, OddValueError, quick_reader, versions_of

R = TypeVar("R")

Json = dict[str, Any]


def since(version: int) -> dict[str, int]:
    """Return the metadata of a field, with a default, that came with `version` of its record."""
    return {SINCE: version}


def encode(record: Any) -> Json:
    """Return `record` (a dataclass instance) as plain JSON types, with `kind` and `version` if its class has them."""
    fields = {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record) if not _is_later(f, record)}
    kind = getattr(record, "KIND", None)
    if kind is None:
        return fields
    return {"kind": kind, "version": max(versions_of(type(record))[0], _newest_field(record)), **fields}


def decode(cls: type[R], value: object, *, where: str) -> R:
    """Return `value` (parsed JSON) as a record of class `cls`; `where` names the file in errors.

    Raises:
        RecordError: another kind or version, an unknown or missing key, or a value of another type.
    """
    try:
        return typing.cast("R", quick_reader(typing.cast(Any, cls))(value))
    except OddValueError:
        pass  # slower, and says what is wrong
    if not isinstance(value, dict):
        raise RecordError(f"expected an object, found {type(value).__name__}", where=where)
    data = dict(value)
    hints = _hints(typing.cast(Any, cls))
    if hasattr(cls, "KIND"):
        version = _check_kind(cls, data, where)
        later = {f.name for f in dataclasses.fields(typing.cast(Any, cls)) if f.metadata.get(SINCE, 0) > version}
        hints = {name: hint for name, hint in hints.items() if name not in later}
    _check_keys(cls, data, hints, where)
    return cls(**{name: _typed(hints[name], item, f"{where}: {name}") for name, item in data.items()})


def dumps(record: Any, *, indent: int | None = None) -> str:
    """Return `record` as JSON text with sorted keys; the same record always gives the same text."""
    separators = (",", ":") if indent is None else None
    return json.dumps(encode(record), sort_keys=True, indent=indent, separators=separators, ensure_ascii=False)


def loads(cls: type[R], text: str, *, where: str) -> R:
    """Parse JSON text as a record of class `cls`.

    Raises:
        RecordError: the text is no JSON, or `decode` refuses it.
    """
    try:
        value = parse_json(text)
    except ValueError as fault:
        raise RecordError(
            f"not valid JSON ({fault})", where=where, why="The file may have been cut or edited"
        ) from None
    return decode(cls, value, where=where)


def write_record(path: Path, record: Any) -> None:
    """Write `record` as an indented JSON file; the name appears only when the file is whole and on disk."""
    write_atomically(path, (dumps(record, indent=2) + "\n").encode())


def read_record(cls: type[R], path: Path) -> R:
    """Read a file that `write_record` wrote.

    Raises:
        RecordError: the file is missing, no UTF-8, no JSON, or not such a record.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror or str(fault) if isinstance(fault, OSError) else "not UTF-8 text"
        mend = "Look at its rights: ls -l" if isinstance(fault, PermissionError) else ""
        raise RecordError(f"can't be read: {reason}", where=str(path), mend=mend) from None
    return loads(cls, text, where=str(path))


def _is_later(field: dataclasses.Field[Any], record: Any) -> bool:
    """Tell whether a field came with a later version, and the record makes no use of it."""
    return SINCE in field.metadata and getattr(record, field.name) == field.default


def _newest_field(record: Any) -> int:
    """Return the version that has all fields that the record makes use of, its parts' as well."""
    used = [f for f in dataclasses.fields(record) if not _is_later(f, record)]
    parts = (getattr(record, f.name) for f in used)
    versions: list[int] = [f.metadata.get(SINCE, 0) for f in used]
    versions += [_newest_field(part) for part in parts if dataclasses.is_dataclass(part)]
    return max(versions, default=0)


def _check_kind(cls: type, data: Json, where: str) -> int:
    kind, version = data.pop("kind", None), data.pop("version", None)
    expected: str = cls.KIND  # type: ignore[attr-defined]
    oldest, newest = versions_of(cls)
    if kind != expected:
        raise RecordError(f"is of kind {kind!r}, expected {expected!r}", where=where)
    if type(version) is not int or not oldest <= version <= newest:
        newer = isinstance(version, int) and version > newest
        mend = "A newer eaglehs wrote it: pip install -U eaglehs" if newer else "Make it anew with this eaglehs"
        known = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        raise RecordError(f"has {expected} version {version!r}; this eaglehs reads {known}", where=where, mend=mend)
    return version


def _check_keys(cls: type, data: Json, hints: dict[str, Any], where: str) -> None:
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise RecordError(f"unknown key {unknown[0]!r}; known keys: {', '.join(sorted(hints))}", where=where)
    optional = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }
    missing = sorted(set(hints) - set(data) - optional)
    if missing:
        raise RecordError(f"key {missing[0]!r} is missing", where=where)


@lru_cache(maxsize=64)
def _hints(cls: Any) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(cls)}
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in names}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _typed(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return None if value is None else _typed(inner[0], value, where)
    if origin is tuple:
        _expect(isinstance(value, list), "a list", value, where)
        return tuple(_typed(typing.get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), "an object", value, where)
        return {key: _typed(typing.get_args(hint)[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value, where=where)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        choices = [item.value for item in hint]
        _expect(value in choices, f"one of {', '.join(choices)}", value, where)
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _expect(type(value) is hint, f"{hint.__name__}", value, where)
    return value


def _expect(is_right: bool, expected: str, value: object, where: str) -> None:
    if not is_right:
        raise RecordError(f"expected {expected}, found {str(value)[:40]!r} ({type(value).__name__})", where=where)
