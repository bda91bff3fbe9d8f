"""Masks over single weights: which are zero, and that they stay zero."""

from __future__ import annotations

from .kernels import kernel_for
from .ranking import Values, chosen, layer_adaptive, order_of_inputs, scores_of, weakest_of
from .schedule import PruningSchedule, masks, progress, remove_masks, set_masks
from .targets import Target, targets

__all__ = [
    "PruningSchedule", "Target", "Values", "chosen", "kernel_for", "layer_adaptive", "masks", "order_of_inputs",
    "progress", "remove_masks", "scores_of", "set_masks", "targets", "weakest_of",
]  # fmt: skip
