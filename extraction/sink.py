"""The one writer of dumps: whole `.pt` files under their final name, or none.

`write_dump` is called by every engine: inside SGLang by the writer threads of extraction/ring.py, elsewhere directly.
Standard library, torch and `schemas` only: this runs as a guest inside SGLang.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..schemas.atomic import staged
from ..schemas.dump import DUMP_KIND, DUMP_VERSION, DumpName, RequestId
from ..schemas.errors import DataError, StorageError
from ..schemas.states import CAPTURE, INPUT_IDS, state_names


class DumpContentError(DataError):
    """The arrays handed over for a dump are not what its name and layers say."""


class DumpWriteError(StorageError):
    """A dump could not be written: the disk is full, read-only or gone."""

    def __init__(self, path: Path, fault: OSError) -> None:
        """Keep the path and the operating system's error."""
        self.path = path
        self.fault = fault
        super().__init__(
            f"can't write the dump {path}: {fault.strerror or fault}",
            mend="Free space in the dump folder, or give another one with --dump-dir",
        )


def write_dump(  # noqa: PLR0913 - the fields of one file, by name; a record of them would be made to be taken apart
    folder: Path,
    name: DumpName,
    *,
    layers: tuple[int, ...],
    prompt_tokens: int | None,
    input_ids: Tensor,
    states: Mapping[str, Tensor],
) -> Path:
    """Write one dump (schemas/dump.py) into `folder` and return its path; the name appears when the file is whole.

    `input_ids` is int32 [n] and each state bfloat16 [n, H], contiguous, on the CPU, with n = `name.num_rows`. They may
    be views of larger buffers: only their own rows are written, and nothing is copied. They must not change before
    this returns. Safe to call from several threads, also for the same name.

    Raises:
        DumpNameError: the request id is no safe file name, or the range of rows is empty.
        DumpContentError: a state is missing or too many, or a shape, dtype or device is another; nothing is written.
        DumpWriteError: the operating system refused; nothing is left under the final name.
    """
    _check_content(name, layers, input_ids, states)
    record = {
        "kind": DUMP_KIND,
        "version": DUMP_VERSION,
        "rid": name.rid,
        "start": name.start,
        "end": name.end,
        "prompt_tokens": prompt_tokens,
        "capture": CAPTURE,
        "layers": list(layers),
        INPUT_IDS: rows_alone(input_ids),
        **{state: rows_alone(states[state]) for state in state_names(layers)},
    }
    path = folder / name.filename
    try:
        # A retracted request computes the same rows again: two threads may be at the same name at once. Not durable:
        # after a power cut nobody trusts the spool, and whoever keeps a dump syncs it before saying so.
        with staged(path, tag=str(threading.get_native_id()), durable=False) as out:
            torch.save(record, out)  # lets go of the GIL while it writes; 1.2 GB/s a thread into /dev/shm
    except (OSError, RuntimeError) as fault:
        raise DumpWriteError(path, _system_error(fault)) from fault
    return path


def rows_alone(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage is these rows and no more.

    `torch.save` writes the whole storage under a tensor: a view of 40 rows of a 6,920-row buffer would become a file
    of 6,920 rows. The new storage holds a reference to the old one. Contiguous tensors only.
    """
    first = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[first : first + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def _system_error(fault: OSError | RuntimeError) -> OSError:
    """Return the operating system's error under `fault`, which is a bug's, and raised again, if there is none.

    On a full disk `torch.save` raises RuntimeError ("unexpected pos") while it closes the archive, and the OSError that
    came first is only its context.
    """
    cause: BaseException | None = fault
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__context__
    raise fault


def _check_content(name: DumpName, layers: tuple[int, ...], input_ids: Tensor, states: Mapping[str, Tensor]) -> None:
    RequestId.parse(name.rid)  # a rid is free text chosen by a client; it must never lead out of the folder
    DumpName.parse(name.filename)  # no empty range, nor one that starts below zero
    wanted = state_names(layers)
    if set(states) != set(wanted):
        raise DumpContentError(f"{name.filename}: states {sorted(states)} were handed over, expected {sorted(wanted)}")
    width = states[wanted[-1]].shape[-1]
    _check_array(name, INPUT_IDS, input_ids, torch.int32, (name.num_rows,))
    for state in wanted:
        _check_array(name, state, states[state], torch.bfloat16, (name.num_rows, width))


def _check_array(name: DumpName, array: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    found = (tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.is_contiguous())
    if found != (dtype, shape, "cpu", True):
        layout = "contiguous" if found[3] else "strided"
        raise DumpContentError(
            f"{name.filename}: {array} is {layout} {found[0]} {list(found[1])} on {found[2]}, "
            f"expected contiguous {dtype} {list(shape)} on cpu"
        )
