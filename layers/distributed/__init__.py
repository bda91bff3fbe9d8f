"""What computes with other processes: replicas, parameters on a mesh, dealt outputs, vocabularies, batch norms, outer
steps.
"""

from __future__ import annotations

from .crossings import AllMembers, Crossing, MeanOfMembers, OwnMembers, SharedByMembers, SumOfMembers
from .dealt import COLUMNS, DealtColumns, SplitColumns, own_share
from .outer_steps import OuterSteps
from .replica import REPLICA, Replica, is_replicated, no_sync, replicate
from .replicated import Layout, deal_parameter, replicate_parameters
from .same_rows import SameRows
from .share import Gathered, Share
from .sync_batch_norm import (
    BATCH_NORMS,
    SYNCHRONIZED,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)
from .vocabulary import SplitCrossEntropy, SplitEmbedding, Words

__all__ = [
    "BATCH_NORMS", "COLUMNS", "REPLICA", "SYNCHRONIZED", "AllMembers", "Crossing", "DealtColumns", "Gathered",
    "Layout", "MeanOfMembers", "OuterSteps", "OwnMembers", "Replica", "SameRows", "Share", "SharedByMembers",
    "SplitColumns", "SplitCrossEntropy", "SplitEmbedding", "SumOfMembers", "SyncBatchNorm", "SyncBatchNorm1d",
    "SyncBatchNorm2d", "SyncBatchNorm3d", "Words", "deal_parameter", "is_replicated", "no_sync", "own_share",
    "replicate", "replicate_parameters",
]  # fmt: skip
