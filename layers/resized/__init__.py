"""Modules in the place of torch's, whose code runs with one width, or one number of items, only."""

from __future__ import annotations

from .attention import ResizedAttention
from .experts import KeptExperts, RemovedExpert, item_names

__all__ = ["KeptExperts", "RemovedExpert", "ResizedAttention", "item_names"]
