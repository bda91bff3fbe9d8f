"""Layers that hold their weights as small numbers, and what their kernels read."""

from __future__ import annotations

from .layer import QuantizedLayer
from .linear import Float8Linear, Int4WeightLinear, Int8DynamicLinear, Int8WeightLinear, QuantizedLinear
from .packing import Packing

__all__ = [
    "Float8Linear",
    "Int4WeightLinear",
    "Int8DynamicLinear",
    "Int8WeightLinear",
    "Packing",
    "QuantizedLayer",
    "QuantizedLinear",
]
