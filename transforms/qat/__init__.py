"""Train a model as it will compute in 8 bits: the pass, and what ends its observing."""

from __future__ import annotations

from ...layers.quantized import freeze
from .qat import Qat

__all__ = ["Qat", "freeze"]
