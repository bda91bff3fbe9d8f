"""Layers that hold their weights as small numbers, and what their kernels read."""

from __future__ import annotations

from .activations import Range, from_numbers, quantized_by_rows, rounded, steps_of_rows, to_numbers
from .layer import ASKED, QuantizedLayer, check_in_floats, is_quantized_by_torch
from .linear import Float8Linear, Int4WeightLinear, Int8DynamicLinear, Int8WeightLinear, QuantizedLinear, TiedInt8Linear
from .lstm import Int8DynamicLSTM
from .pooling import max_pool_numbers
from .static import StaticComputation, StaticConv, StaticLayer, StaticLinear, TiedStaticLinear
from .trained import TRAINED, FakeQuantized, Freezable, fake_quantized, freezable, freeze

__all__ = [
    "ASKED", "ON_NUMBERS", "TRAINED", "FakeQuantized", "Float8Linear", "Freezable", "Int4WeightLinear",
    "Int8DynamicLSTM", "Int8DynamicLinear", "Int8WeightLinear", "QuantizedLayer", "QuantizedLinear", "Range",
    "StaticComputation", "StaticConv", "StaticLayer", "StaticLinear", "TiedInt8Linear", "TiedStaticLinear",
    "check_in_floats", "fake_quantized", "freezable", "freeze", "from_numbers", "is_quantized_by_torch",
    "max_pool_numbers", "quantized_by_rows", "rounded", "steps_of_rows", "to_numbers",
]  # fmt: skip

ON_NUMBERS = (to_numbers, max_pool_numbers, rounded)
"""The functions that graphs call between layers of 8 bits; they only compute."""
