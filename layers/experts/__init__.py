"""Experts of users' models, computed together."""

from __future__ import annotations

from .fused import FusedExperts, Routing, added_to, apply_linear

__all__ = ["FusedExperts", "Routing", "added_to", "apply_linear"]
