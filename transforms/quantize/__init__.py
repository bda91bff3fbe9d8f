"""Compute layers with small integers or floats: the pass, and which layers can be."""

from __future__ import annotations

from .quantize import Quantize
from .static import candidates

__all__ = ["Quantize", "candidates"]
