"""eaglehs: hidden-state datasets for EAGLE-3 drafters.

Training code needs three names, loaded when first used: `stream(path_or_repo, ...)`, `decode(sample)` and
`collate(samples, ...)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builder.collate import collate
    from .builder.decode import decode
    from .builder.stream import stream

__all__ = ["__version__", "collate", "decode", "stream"]

__version__ = "0.1.0"

_LAZY = {"collate": "builder.collate", "decode": "builder.decode", "stream": "builder.stream"}


def __getattr__(name: str) -> Any:
    """Import `stream`, `decode` and `collate` on first use: `eaglehs --help` must not load torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'eaglehs' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
