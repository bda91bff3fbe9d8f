"""Compute a mixture's experts together instead of one after another in a loop."""

from __future__ import annotations

from .fuse_experts import FuseExperts, Lowering

__all__ = ["FuseExperts", "Lowering"]
