"""Whether every training step runs the same modules, as far as graphs say it."""

from __future__ import annotations

from torch import nn

from ...tracing.graphs import Specialization
from ...tracing.program import Program

__all__ = ["branching"]


def branching(program: Program) -> str | None:
    """Return a module that may use other parameters in another step, or None.

    A module with a graph uses other parameters where its graphs for training call other modules or read other tensors;
    of one without a graph nothing is known, save that it uses its own parameters.
    """
    for name in program.opaque:
        if _has_trained_children(program.module(name)):
            return name or "(root)"
    for name, capture in program.captures.items():
        used = {_used(each) for each in capture.specializations if not _is_for_evaluation(each, program.module(name))}
        if len(used) > 1:
            return name or "(root)"
    return None


def _has_trained_children(module: nn.Module) -> bool:
    return any(p.requires_grad for child in module.children() for p in child.parameters())


def _used(specialization: Specialization) -> frozenset[str]:
    return frozenset(str(n.target) for n in specialization.graph.nodes if n.op in ("call_module", "get_attr"))


def _is_for_evaluation(specialization: Specialization, module: nn.Module) -> bool:
    return specialization.runs_in_mode(module, flipped=module.training)
