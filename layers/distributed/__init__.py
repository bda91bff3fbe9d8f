"""What computes with other processes: replicas, replicated parameters, batch norms, outer steps."""

from __future__ import annotations

from .outer_steps import OuterSteps
from .replica import REPLICA, Replica, is_replicated, no_sync, replicate
from .replicated import replicate_parameters
from .sync_batch_norm import (
    BATCH_NORMS,
    SYNCHRONIZED,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)

__all__ = [
    "BATCH_NORMS", "REPLICA", "SYNCHRONIZED", "OuterSteps", "Replica", "SyncBatchNorm", "SyncBatchNorm1d",
    "SyncBatchNorm2d", "SyncBatchNorm3d", "is_replicated", "no_sync", "replicate", "replicate_parameters",
]  # fmt: skip
