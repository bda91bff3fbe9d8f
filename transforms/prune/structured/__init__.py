"""Structured pruning: which units go, and how they are removed."""

from __future__ import annotations

from .finding import find
from .reference import with_zeros
from .removal import remove

__all__ = ["find", "remove", "with_zeros"]
