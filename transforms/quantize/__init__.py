"""Compute layers with small integers or floats: the pass, and which layers can be."""

from __future__ import annotations

from .judging import number_of
from .layers import candidates
from .quantize import Quantize

__all__ = ["Quantize", "candidates", "number_of"]
