"""The graph that a called module runs: one that it was captured with, or the only one of a `torch.nn` leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from ....passes.rewriting import unmet_guards
from ....runtime.graphs import Capture, Specialization
from ....runtime.guards import require
from ....tracing.rules import leaf_graph
from .batchable_modules import module_operator
from .mode_guards import is_passed_on

__all__ = ["checks_on_the_way", "has_plain_output", "leaf_graph_of", "specialization_of_call"]


def leaf_graph_of(module: nn.Module) -> fx.Graph | None:
    """Return the graph that a leaf always runs; None where there is none, or where the module stays one operation."""
    return None if module_operator(module) is not None else leaf_graph(module)


def specialization_of_call(
    module: nn.Module, capture: Capture, given: Mapping[str, Any], flipped: bool
) -> Specialization | None:
    """Return the graph that a module runs for a call in its mode (or the other one); None: that depends."""
    in_mode = [
        specialization
        for specialization in capture.specializations
        if specialization.runs_in_mode(module, flipped=flipped)
    ]
    if len(in_mode) == 1:
        return in_mode[0]
    for specialization in in_mode:
        if all(map(is_passed_on, unmet_guards(module, specialization, given))):
            return specialization
    return None


def checks_on_the_way(graph: fx.Graph) -> bool:
    """Say whether a graph starts over where a value in its middle is not as it was at capture."""
    return bool(graph.find_nodes(op="call_function", target=require, sort=False))


def has_plain_output(graph: fx.Graph) -> bool:
    """Say whether a graph returns a value or a plain structure of them."""
    return isinstance(graph.output_node().args[0], (fx.Node, tuple, list, dict))
