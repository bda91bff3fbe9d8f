"""Compute in 16 bits what gains by it: the pass, the lists of operators, the regions, and what a region runs under."""

from __future__ import annotations

from .autocast import Autocast

__all__ = ["Autocast"]
