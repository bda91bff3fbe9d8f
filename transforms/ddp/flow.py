"""Whether every training step runs the same modules, as far as graphs say it."""

from __future__ import annotations

import operator

from torch import fx, nn

from ...operators import operator_info
from ...runtime.graphs import Specialization
from ...runtime.guards import require
from ...tracing.program import Program

__all__ = ["branching"]


def branching(program: Program) -> str | None:
    """Return a module that may use other parameters in another step, or None: its graphs for training differ, or draw.

    Of one without a graph nothing is known, save that it uses its own parameters.
    """
    for name in program.opaque:
        if _has_trained_children(program.module(name)):
            return name or "(root)"
    for name, capture in program.captures.items():
        training = [each for each in capture.specializations if not _is_for_evaluation(each, program.module(name))]
        if len(set(map(_used, training))) > 1 or any(map(_decides_at_random, training)):
            return name or "(root)"
    return None


def _has_trained_children(module: nn.Module) -> bool:
    return any(p.requires_grad for child in module.children() for p in child.parameters())


def _used(specialization: Specialization) -> frozenset[str]:
    return frozenset(str(n.target) for n in specialization.graph.nodes if n.op in ("call_module", "get_attr"))


def _decides_at_random(specialization: Specialization) -> bool:
    decided = (node.args[0] for node in specialization.graph.nodes if node.target is require)
    return any(isinstance(value, fx.Node) and _is_drawn(value) for value in decided)


def _is_drawn(decided: fx.Node) -> bool:
    """Say whether a decision hangs on a number that is drawn; none is less than 0, the share of layers to drop."""
    seen, pending = {decided}, [decided]
    for node in pending:
        if node.target is operator.lt and node.args[1] == 0:
            continue
        if not node.all_input_nodes and operator_info(getattr(node.target, "__name__", None)).random:
            return True
        pending += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return False


def _is_for_evaluation(specialization: Specialization, module: nn.Module) -> bool:
    return specialization.runs_in_mode(module, flipped=module.training)
