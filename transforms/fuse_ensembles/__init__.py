"""Fuse isomorphic, independent members into batched operations on stacked parameters."""

from __future__ import annotations

from .fusion import FuseEnsembles, Lowering
from .lowerings import BatchingRule

__all__ = ["BatchingRule", "FuseEnsembles", "Lowering"]
