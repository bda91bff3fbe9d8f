"""Plain values, and the mark of numbers that take as long whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

__all__ = ["DTYPES", "PLAIN_TYPES", "Factors", "is_plain_structure"]

PLAIN_TYPES: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip
"""The types of numbers that files name, by their words."""


def is_plain_structure(value: Any) -> bool:
    """Tell whether a value is plain, or a tuple or list of such."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain_structure, cast("Sequence[Any]", value)))
    return type(value) in PLAIN_TYPES


class Factors:
    """Numbers to compute with: whatever they are, it takes as long."""

    __slots__ = ()
