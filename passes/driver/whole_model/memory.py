"""Measure what a training step of the whole model takes in memory, where a pass is for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ....errors import BudgetError
from ....runtime.record import Decision
from ....tracing.isolation import in_phase
from ....tracing.program import Program, is_on_meta
from ...contract import Pass
from ...sites import Goal
from ...timing import MemoryUse, memory_use

__all__ = ["measured_memory", "memory_figures"]


def measured_memory(program: Program, passes: Sequence[Pass]) -> MemoryUse | None:
    """Return what a training step takes now; None if no pass is for memory, or nothing can be run."""
    is_wanted = program.training and any(pass_.goal is Goal.MEMORY for pass_ in passes)
    if not is_wanted or not program.whole_calls or is_on_meta(program.model):
        return None
    try:
        with in_phase(program.model, True):
            use = memory_use(program.model, program.whole_calls)
    except torch.OutOfMemoryError:
        return None  # the model as it was may be too large: that is what the pass is for
    program.held = use.live if program.held is None else program.held
    return use


def memory_figures(
    before: MemoryUse, program: Program, passes: Sequence[Pass], decisions: Sequence[Decision]
) -> Mapping[str, int] | None:
    """Return the memory in bytes for the report, if anything was rewritten; BudgetError where a pass missed its aim."""
    after = measured_memory(program, passes) or before
    for step, pass_ in enumerate(passes):
        mine = [decision for decision in decisions if decision.step == step]
        if pass_.goal is Goal.MEMORY and any(decision.status != "refused" for decision in mine):
            _check(pass_, before, after, mine)
    if not any(decision.status == "applied" for decision in decisions):
        return None
    return {
        "live_before": before.live, "live_after": after.live,
        "peak_before": before.peak, "peak_after": after.peak,
    }  # fmt: skip


def _check(pass_: Pass, before: MemoryUse, after: MemoryUse, decisions: Sequence[Decision]) -> None:
    try:
        pass_.check_memory(before.live, after.live)
    except BudgetError as error:
        left = dict.fromkeys(f"{each.label}: {each.reason}" for each in decisions if each.status != "applied")
        if not left:
            raise
        raise BudgetError(
            f"{error}; {len(left)} of {len(decisions)} places were left, as {next(iter(left))}"
        ) from error
