"""Pruning: what may go, by which scores; masks over weights, and layers that are really smaller."""

from __future__ import annotations

from .prune import Prune

__all__ = ["Prune"]
