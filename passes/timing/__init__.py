"""Interleaved timing of candidates, and what all of it may take."""

from __future__ import annotations

from .budget import DEFAULT_BUDGET, BudgetRequest, TimeBudget
from .collection import collection_paused
from .measure import FEWEST_CALLS, Interval, Timings, time_candidates
from .runner import Runner, forward_seconds, runner

__all__ = [
    "DEFAULT_BUDGET",
    "FEWEST_CALLS",
    "BudgetRequest",
    "Interval",
    "Runner",
    "TimeBudget",
    "Timings",
    "collection_paused",
    "forward_seconds",
    "runner",
    "time_candidates",
]
