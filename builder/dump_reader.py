"""Opens a dump: a file that anyone may have written becomes a record that the rest of the builder trusts.

    read_dump(path, layout) -> Dump     zip records, safe unpickling, schema; where each array lies in the file

No array is read here: the file is mapped, its pages are never touched. The arrays' places come from two independent
sources, the zip's directory and the addresses that torch mapped the storages at, and must agree for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..schemas.counts import counted
from ..schemas.dump import DUMP_KIND, DUMP_VERSION, DumpName, RequestId
from ..schemas.states import CAPTURE, INPUT_IDS, state_names
from ..schemas.type_names import type_name
from .dump_zip import DumpError, DumpUnreadableError, ZipRecord, cut_error, storage_records
from .plan import DatasetLayout

_HEADER_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "version": (int,),
    "rid": (str,),
    "start": (int,),
    "end": (int,),
    "prompt_tokens": (int, type(None)),
    "capture": (str,),
    "layers": (list,),
}
_ZIP_BYTES = 16 * 1024
"""More than the zip itself takes: its headers, pickle and alignment."""


class DumpSchemaError(DumpError):
    """The file is a whole `torch.save` file, but not the dump that its name and the run say."""


class DumpRowsError(DumpSchemaError):
    """An array has another number of rows than the dump has token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRange:
    """Where an array's bytes lie in a dump; C order, little-endian."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A dump whose header and schema are right; its values are not looked at yet."""

    path: Path
    name: DumpName
    request: RequestId
    prompt_tokens: int | None
    size_bytes: int
    arrays: dict[str, ArrayRange]
    """`input_ids` and all states."""

    @property
    def content_bytes(self) -> int:
        """Bytes of all arrays, by shape."""
        return sum(place.length for place in self.arrays.values())

    @property
    def is_bloated(self) -> bool:
        """Whether the file is over twice its content: a saved view drags the whole buffer under it along."""
        return self.size_bytes > 2 * self.content_bytes + _ZIP_BYTES


def read_dump(path: Path, layout: DatasetLayout) -> Dump:
    """Return what a dump holds and where; `layout` is the run's.

    Raises:
        DumpNameError: the file's name is no dump's.
        DumpUnreadableError: missing, cut, damaged, compressed or foreign.
        DumpTypeError: it holds other things than tensors and plain types.
        DumpSchemaError: a wrong key, kind, version, layer list, dtype, shape, or another header than the name.
    """
    name = DumpName.parse(path.name)
    request = RequestId.parse(name.rid)
    try:
        with path.open("rb") as file:
            records = storage_records(path, file)
            size_bytes = file.seek(0, 2)
            content = _load(path)
    except FileNotFoundError:
        raise DumpUnreadableError(path, "is not there", mend="Run `eaglehs extract` again to make it") from None
    except OSError as fault:
        raise DumpUnreadableError(path, f"can't be read: {fault.strerror or fault}") from None
    _check_header(path, name, content, layout)
    arrays = _check_arrays(path, name, content, layout)
    return Dump(
        path=path,
        name=name,
        request=request,
        prompt_tokens=content["prompt_tokens"],
        size_bytes=size_bytes,
        arrays=_locate(path, arrays, records),
    )


def _load(path: Path) -> dict[str, Any]:
    """Unpickle without running code and without a GPU, whatever device the tensors were saved from."""
    try:
        content = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as fault:  # noqa: BLE001 - damaged files make torch raise a dozen kinds; this is their border
        raise cut_error(path, f"{type(fault).__name__}: {fault}".splitlines()[0]) from None
    if type(content) is not dict:
        raise DumpSchemaError(path, f"holds a {type(content).__name__}, expected a dict of kind {DUMP_KIND}")
    return content


def _check_header(path: Path, name: DumpName, content: dict[str, Any], layout: DatasetLayout) -> None:
    if content.get("kind") != DUMP_KIND or content.get("version") != DUMP_VERSION:
        kind, version = content.get("kind"), content.get("version")
        raise DumpSchemaError(
            path,
            f"is of kind {kind!r} version {version!r}, expected {DUMP_KIND!r} version {DUMP_VERSION}",
            mend="Dumps of other tools come in with `eaglehs import`",
        )
    wanted = {*_HEADER_TYPES, INPUT_IDS, *state_names(layout.layers)}
    _check_keys(path, set(content), wanted, content.get("layers"))
    for key, types in _HEADER_TYPES.items():
        if type(content[key]) not in types:
            raise DumpSchemaError(path, f"{key} is {type_name(content[key])}, expected {types[0].__name__}")
    expected: dict[str, object] = {"rid": name.rid, "start": name.start, "end": name.end, "capture": CAPTURE}
    for key, value in {**expected, "layers": list(layout.layers)}.items():
        if content[key] != value:
            source = "the file's name says" if key in {"rid", "start", "end"} else "the run has"
            raise DumpSchemaError(path, f"{key} is {content[key]!r}, but {source} {value!r}")


def _check_keys(path: Path, found: set[Any], wanted: set[str], layers: object) -> None:
    for problem, keys in (("is missing", wanted - found), ("is unknown", found - wanted)):
        if keys:
            key = sorted(map(str, keys))[0]
            raise DumpSchemaError(
                path,
                f"key {key!r} {problem} (the file's layers: {layers!s:.60}); expected {', '.join(sorted(wanted))}",
                why="It was made with other layers, or by another tool",
            )


def _check_arrays(
    path: Path, name: DumpName, content: dict[str, Any], layout: DatasetLayout
) -> dict[str, torch.Tensor]:
    arrays = {key: content[key] for key in (INPUT_IDS, *state_names(layout.layers))}
    for key, array in arrays.items():
        if type(array) is not torch.Tensor:
            raise DumpSchemaError(path, f"{key} is {type_name(array)}, expected a tensor")
        dtype = torch.int32 if key == INPUT_IDS else torch.bfloat16
        if array.dtype != dtype or array.layout != torch.strided:
            raise DumpSchemaError(path, f"{key} is {array.dtype} {array.layout}, expected dense {dtype}")
        _check_shape(path, name, key, array, layout)
        if not array.is_contiguous():
            raise DumpSchemaError(path, f"{key} is not in C order: strides {array.stride()}, shape {list(array.shape)}")
    return arrays


def _check_shape(path: Path, name: DumpName, key: str, array: torch.Tensor, layout: DatasetLayout) -> None:
    wanted = [name.num_rows] if key == INPUT_IDS else [name.num_rows, layout.hidden_size]
    found = list(array.shape)
    if found == wanted:
        return
    what = f"{key} has shape {found}, expected {wanted} ([tokens, width])"
    if found[1:] != wanted[1:] or not found:
        raise DumpSchemaError(path, what, why="Another model's width, or axes in another order")
    if found[0] < wanted[0]:
        raise DumpRowsError(
            path,
            f"{what}: {counted(wanted[0] - found[0], 'row is', 'rows are')} missing",
            why="The engine took them from its prefix cache and never computed them",
            mend="Restart the server with --disable-radix-cache",
        )
    raise DumpRowsError(
        path,
        f"{what}: {counted(found[0] - wanted[0], 'row')} too many",
        why="A padded batch was not cut to its live rows",
    )


def _locate(path: Path, arrays: dict[str, torch.Tensor], records: tuple[ZipRecord, ...]) -> dict[str, ArrayRange]:
    """Return each array's place in the file; the distance between address and offset is one for all storages."""
    storages = {array.untyped_storage().data_ptr(): array.untyped_storage().nbytes() for array in arrays.values()}
    pairs = list(zip(sorted(storages), records, strict=False))
    bases = {address - record.offset for address, record in pairs}
    sizes_agree = all(storages[address] == record.length for address, record in pairs)
    if len(storages) != len(records) or len(bases) != 1 or not sizes_agree:
        raise DumpUnreadableError(
            path,
            f"its {counted(len(records), 'stored record does', 'stored records do')} not fit "
            f"its {counted(len(storages), 'tensor')}",
            why="The file holds other data, or is damaged",
        )
    places = {
        key: ArrayRange(offset=array.data_ptr() - next(iter(bases)), length=array.nbytes)
        for key, array in arrays.items()
    }
    _check_apart(path, places)
    return places


def _check_apart(path: Path, places: dict[str, ArrayRange]) -> None:
    ordered = sorted(places.items(), key=lambda item: item[1].offset)
    for (one, place), (other, after) in pairwise(ordered):
        if place.offset + place.length > after.offset:
            raise DumpSchemaError(path, f"{one} and {other} are the same bytes", why="One state was saved as two")
