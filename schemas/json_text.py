"""JSON text to plain values, with every way in which text can be no JSON told by one exception."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is no JSON, or is nested too deeply to be read (Python's own error for that is none of
            its JSON errors, and ended commands with a traceback).
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
