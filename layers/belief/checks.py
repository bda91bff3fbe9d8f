"""What the layers of this folder make sure of before they work: sizes, options, and the data they are given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, UsageError, expect
from .units import VisibleUnits

__all__ = ["check_values", "non_negative", "rows_of_width"]


def non_negative(value: Any, name: str, below: float = math.inf) -> float:
    """Return a number that must be at least 0, and below a bound, or raise a UsageError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        bound = "" if below == math.inf else f", below {below:g}"
        raise UsageError(f"{name} is {value!r}; give a number, at least 0{bound}")
    return float(value)


def rows_of_width(v: Any, width: int, dtype: torch.dtype, what: str = "visible units") -> Tensor:
    """Return units [..., width], integers and booleans as floats, or raise a UsageError."""
    expect(v, Tensor, f"what stands for the {what}", f"a tensor [..., {width}]")
    if v.dim() == 0 or v.shape[-1] != width:
        raise UsageError(f"{width} {what} are needed, the tensor's shape is {list(v.shape)}; give [..., {width}]")
    return v if v.is_floating_point() else v.to(dtype)


@torch.no_grad()
def check_values(v: Tensor, units: VisibleUnits, what: str) -> None:
    """Raise an InputError unless there are rows, with values that visible units of this kind take."""
    if v.numel() == 0:
        raise InputError(f"{what} has no rows: its shape is {list(v.shape)}")
    low, high = (float(bound) for bound in torch.aminmax(v))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(f"{what} has values that are NaN or infinite; remove or replace them")
    reason = units.refused(v, low, high)
    if reason:
        raise InputError(f"{what} has {reason}")
