"""Compute with integers of 8 or 4 bits, or floats of 8: the pass, what its schemes share, and the schemes."""

from __future__ import annotations

from .quantize import Quantize

__all__ = ["Quantize"]
