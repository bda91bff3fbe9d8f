"""Compute layers on weights that are packed once for this machine: the pass, what it finds, what it writes."""

from __future__ import annotations

from .pack import Pack

__all__ = ["Pack"]
