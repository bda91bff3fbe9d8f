"""Compute layers with small integers or floats: the pass, and which layers can be."""

from __future__ import annotations

from .layers import candidates
from .quantize import Quantize
from .within import costs

__all__ = ["Quantize", "candidates", "costs"]
