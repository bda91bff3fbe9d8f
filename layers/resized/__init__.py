"""Modules in the place of torch's, whose code runs with one width, or one number of items, only."""

from __future__ import annotations

from .attention import ResizedAttention
from .blocks import SkippedBlock, hidden_state
from .experts import KeptExperts, RemovedExpert, item_names

__all__ = ["KeptExperts", "RemovedExpert", "ResizedAttention", "SkippedBlock", "hidden_state", "item_names"]
