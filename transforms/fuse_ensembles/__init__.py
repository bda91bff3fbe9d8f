"""Fuse isomorphic, independent members into batched operations on stacked parameters."""

from __future__ import annotations

from .fuse_ensembles import FuseEnsembles, Lowering
from .lowerings import BatchingRule

__all__ = ["BatchingRule", "FuseEnsembles", "Lowering"]
