"""Numpy in traced forwards: its functions of plain numbers are recorded; its arrays are not."""

from __future__ import annotations

import numbers
from typing import Any

import torch

__all__ = ["is_array", "is_number", "is_scalar"]


def is_array(value: object) -> bool:
    """Tell whether a value is an array of numpy's."""
    kind: Any = type(value)
    return any(base.__module__ == "numpy" and base.__name__ == "ndarray" for base in kind.__mro__)


def is_scalar(value: object) -> bool:
    """Tell whether a value is a single number, or flag, of numpy's, which nobody can change."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and not is_array(value)


def is_number(value: object) -> bool:
    """Tell whether a value is a plain number, or a shape, or a tuple of numbers."""
    if type(value) in (tuple, list, torch.Size):
        return all(map(is_number, value))  # pyright: ignore[reportArgumentType, reportUnknownArgumentType]
    return isinstance(value, (numbers.Number, bool)) or is_scalar(value)
