"""Pruning: which weights a model can do without, and how they go."""

from __future__ import annotations

from .prune import Prune

__all__ = ["Prune"]
