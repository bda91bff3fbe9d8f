"""Structured pruning: which units go, and how they are removed."""

from __future__ import annotations

from .finding import find
from .reference import with_zeros
from .removal import remove
from .selection import Criterion, Scores, Selection, Target

__all__ = ["Criterion", "Scores", "Selection", "Target", "find", "remove", "with_zeros"]
