"""Compute layers with small integers or floats: the pass, and which layers can be."""

from __future__ import annotations

from .judging import ComparedRun, number_of
from .layers import candidates
from .quantize import Quantize
from .within import costs

__all__ = ["ComparedRun", "Quantize", "candidates", "costs", "number_of"]
