"""Dumps to shards to tensors: plan, check, write, index, verify, read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset_builder import HiddenStates

__all__ = ["HiddenStates"]


def __getattr__(name: str) -> Any:
    """Import `HiddenStates` on first use: packing and verifying must not wait for `datasets`."""
    if name != "HiddenStates":
        raise AttributeError(f"module 'eaglehs.builder' has no attribute {name!r}")
    from .dataset_builder import HiddenStates

    return HiddenStates
