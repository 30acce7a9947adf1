"""The type of a value where another was expected, as people read it: `an int`, `a list`."""

from __future__ import annotations


def type_name(value: object) -> str:
    """Return the name of the type of `value` with its article."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
