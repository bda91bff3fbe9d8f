"""Batch norms, whose statistics would be of microbatches."""

from __future__ import annotations

from torch import nn

from ...compat import modules_by_name
from ...errors import UsageError
from ...layers.sync_batch_norm import BATCH_NORMS

__all__ = ["check_norms"]


def check_norms(model: nn.Module) -> None:
    """Raise UsageError where a batch norm computes statistics: they would be of microbatches."""
    for name, module in modules_by_name(model).items():
        if isinstance(module, BATCH_NORMS) and (module.training or not module.track_running_stats):
            raise UsageError(
                f"'{name}' is a {type(module).__name__} in training, and a pipeline would give it statistics of "
                "microbatches: freeze it (.eval() after every model.train()), or use GroupNorm"
            )
