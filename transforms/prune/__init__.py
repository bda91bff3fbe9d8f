"""Pruning: which weights a model can do without, and how they go."""

from __future__ import annotations

from .masks import PruningSchedule, masks, remove_masks, set_masks
from .prune import Prune

__all__ = ["Prune", "PruningSchedule", "masks", "remove_masks", "set_masks"]
