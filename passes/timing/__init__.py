"""Interleaved timing of candidates, and what all of it may take."""

from __future__ import annotations

from .budget import DEFAULT_BUDGET, BudgetRequest, TimeBudget
from .collection import collection_paused
from .measure import CALLS_OF_EACH, CALLS_OF_TWO, Interval, Timings, time_candidates
from .runner import Runner, forward_seconds, runner

__all__ = [
    "CALLS_OF_EACH",
    "CALLS_OF_TWO",
    "DEFAULT_BUDGET",
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
