"""Measure what a training step of the whole model takes in memory, where a pass is for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ....tracing.program import Program
from ....tracing.recording import in_phase
from ...contract import Pass
from ...sites import Goal
from ...timing import MemoryUse, memory_use
from ...verification import is_on_meta

__all__ = ["measured_memory", "memory_figures"]


def measured_memory(program: Program, passes: Sequence[Pass]) -> MemoryUse | None:
    """Return what a training step takes now; None if no pass is for memory, or nothing can be run."""
    is_wanted = program.training and any(pass_.goal is Goal.MEMORY for pass_ in passes)
    if not is_wanted or not program.whole_calls or is_on_meta(program.model):
        return None
    try:
        with in_phase(program.model, True):
            return memory_use(program.model, program.whole_calls)
    except torch.OutOfMemoryError:
        return None  # the model as it was may be too large: that is what the pass is for


def memory_figures(before: MemoryUse | None, after: MemoryUse | None) -> Mapping[str, int] | None:
    """Return what the report says of memory, in bytes."""
    if before is None or after is None:
        return None
    return {
        "live_before": before.live, "live_after": after.live,
        "peak_before": before.peak, "peak_after": after.peak,
    }  # fmt: skip
