"""Byte sizes as people write them: GB is decimal as on the Hub, GiB is binary."""

from __future__ import annotations

import re

from .counts import counted
from .errors import UsageError

DEFAULT_SHARD_BYTES = 2_000_000_000
"""Upper bound of a shard file where no other is given."""

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `2GB` (2,000,000,000), `2GiB` (2,147,483,648), `1.5g`, `100 kB` or `512`.

    Raises:
        UsageError: no number, an unknown unit, zero, or less than a byte.
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(
            f"{text!r} is not a size",
            mend="Write a number and one of B, kB, MB, GB, TB (decimal) or KiB, MiB, GiB, TiB (binary), such as 2GB",
        )
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if size_bytes < 1:
        raise UsageError(f"{text!r} is {counted(size_bytes, 'byte')}", mend="Give a size above zero, such as 2GB")
    return size_bytes


def format_size(size_bytes: int | float) -> str:
    """Return decimal units with three significant digits, as the Hub counts: 992 GB, 1.04 MB, 12 B."""
    value, units = float(size_bytes), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while abs(value) >= 999.5 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{int(value)} B" if unit == "B" else f"{value:.3g} {unit}"
