"""Compute activations again in the backward: the pass, its cost model, its solver, what regions run under."""

from __future__ import annotations

from .checkpoint import Checkpoint

__all__ = ["Checkpoint"]
