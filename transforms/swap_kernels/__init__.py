"""Put operators with kernels of their own in the place of operations that compute the same."""

from __future__ import annotations

from .decompositions import is_cast, spelled, tensor, through
from .occurrences import Occurrence
from .swap_kernels import SwapKernels

__all__ = ["Occurrence", "SwapKernels", "is_cast", "spelled", "tensor", "through"]
