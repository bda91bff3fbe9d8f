"""Fuse isomorphic, independent members into batched operations on stacked parameters."""

from __future__ import annotations

from .fusion import FuseEnsembles, Lowering

__all__ = ["FuseEnsembles", "Lowering"]
