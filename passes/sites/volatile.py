"""Modules whose attributes are set while the model runs: what they compute cannot be verified call by call."""

from __future__ import annotations

from torch import nn

from ...runtime.graphs import capture_of

__all__ = ["VOLATILE", "is_volatile"]

VOLATILE = "its attributes are set while the model runs"


def is_volatile(module: nn.Module) -> bool:
    """Say whether one of a module's own graphs sets attributes, or was traced with some that were set before."""
    capture = capture_of(module)
    return capture is not None and any(specialization.volatile for specialization in capture.specializations)
