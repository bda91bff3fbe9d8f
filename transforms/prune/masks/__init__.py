"""Masks over single weights: which are zero, and that they stay zero."""

from __future__ import annotations

from .held import masks, remove_masks, set_masks
from .kernels import kernel_for
from .neighbours import order_of_inputs, weakest_of
from .ranking import chosen, scores_of
from .schedule import PruningSchedule
from .targets import Target, targets

__all__ = [
    "PruningSchedule",
    "Target",
    "chosen",
    "kernel_for",
    "masks",
    "order_of_inputs",
    "remove_masks",
    "scores_of",
    "set_masks",
    "targets",
    "weakest_of",
]
