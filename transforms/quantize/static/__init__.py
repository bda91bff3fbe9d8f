"""int8_static: weights and activations in 8 bits, with ranges of activations that calibration found."""

from __future__ import annotations

from .static import find
from .write import rewrite

__all__ = ["find", "rewrite"]
