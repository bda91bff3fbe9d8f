"""Pruning: which weights a model can do without, and how they go."""

from __future__ import annotations

from .masks import PruningSchedule, masks, remove_masks, set_masks
from .prune import Prune
from .sparse_training import GroupSparsity, shares_in_steps

__all__ = ["GroupSparsity", "Prune", "PruningSchedule", "masks", "remove_masks", "set_masks", "shares_in_steps"]
