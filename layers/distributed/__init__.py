"""What computes with other processes: replicas, replicated parameters, dealt outputs, vocabularies, batch norms, outer
steps.
"""

from __future__ import annotations

from .dealt import COLUMNS, DealtColumns
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
from .vocabulary import GatheredLogits, Share, SplitCrossEntropy, SplitEmbedding

__all__ = [
    "BATCH_NORMS", "COLUMNS", "REPLICA", "SYNCHRONIZED", "DealtColumns", "GatheredLogits", "OuterSteps", "Replica",
    "Share", "SplitCrossEntropy", "SplitEmbedding", "SyncBatchNorm", "SyncBatchNorm1d", "SyncBatchNorm2d",
    "SyncBatchNorm3d", "is_replicated", "no_sync", "replicate", "replicate_parameters",
]  # fmt: skip
