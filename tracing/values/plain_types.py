"""Plain values: they have no parts and never change, and their text says all about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

__all__ = ["PLAIN_TYPES", "is_plain_structure"]

PLAIN_TYPES: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def is_plain_structure(value: Any) -> bool:
    """Tell whether a value is plain, or a tuple or list of such."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain_structure, cast("Sequence[Any]", value)))
    return type(value) in PLAIN_TYPES
