"""Masks over single weights: which are zero, and that they stay zero."""

from __future__ import annotations

from .held import masks, remove_masks, set_masks
from .schedule import PruningSchedule
from .sites import find, reference, rewrite

__all__ = ["PruningSchedule", "find", "masks", "reference", "remove_masks", "rewrite", "set_masks"]
