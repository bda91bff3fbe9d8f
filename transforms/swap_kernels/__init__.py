"""Put operators with kernels of their own in the place of operations that compute the same."""

from __future__ import annotations

from .occurrences import Occurrence
from .spelled import spelled, tensor, through
from .swap import SwapKernels

__all__ = ["Occurrence", "SwapKernels", "spelled", "tensor", "through"]
