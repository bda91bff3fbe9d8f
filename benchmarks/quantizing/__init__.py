"""The models that `benchmarks/quantization.py` quantizes, and the ways to do it."""

from __future__ import annotations

from .cases import CASES, Case
from .prepared import Prepared, Way, called, first_tensor
from .ways import WAYS

__all__ = ["CASES", "WAYS", "Case", "Prepared", "Way", "called", "first_tensor"]
