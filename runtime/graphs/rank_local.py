"""Runs of one rank by itself: a model that is recorded, checked or timed must not wait for other ranks."""

from __future__ import annotations

from ..values import ContextFlag

__all__ = ["rank_local", "trial_step"]

rank_local = ContextFlag("rank_local")
"""Layers that compute over all ranks compute over this one: the others may not run them now."""

trial_step = ContextFlag("trial_step")
"""Replicas average gradients on all ranks, and learn nothing from it."""
