"""Structured pruning: how much units count, which of them go, and what that saves."""

from __future__ import annotations

from .costs import Cost, DoesNotRun, cost_of, with_costs
from .scores import NoScores, scores_of_units
from .sites import Chosen, choose, chosen_for_target, sites_of

__all__ = [
    "Chosen", "Cost", "DoesNotRun", "NoScores", "choose", "chosen_for_target", "cost_of", "scores_of_units",
    "sites_of", "with_costs",
]  # fmt: skip
