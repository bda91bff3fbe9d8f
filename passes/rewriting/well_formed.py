"""What every rewritten graph must be: valid, with targets that are there, called as before."""

from __future__ import annotations

import operator

from torch import fx, nn

from ...errors import CaptureError

__all__ = ["check_well_formed", "is_same_graph"]


def check_well_formed(graph: fx.Graph, before: fx.Graph, owner: nn.Module) -> None:
    """Raise CaptureError if a rewritten graph of `owner` is malformed, or has other inputs than before."""
    try:
        graph.lint()
        _check_targets(graph, owner)
        _check_inputs(graph, before)
    except (RuntimeError, AttributeError, ValueError) as error:
        raise CaptureError(f"the rewritten graph is malformed: {error}") from error


def _check_inputs(graph: fx.Graph, before: fx.Graph) -> None:
    names, given = ([node.name for node in g.find_nodes(op="placeholder")] for g in (before, graph))
    if names != given:
        raise ValueError(f"its inputs changed from {', '.join(names)} to {', '.join(given)}")


def _check_targets(graph: fx.Graph, owner: nn.Module) -> None:
    for node in graph.nodes:
        if node.op == "call_module":
            owner.get_submodule(str(node.target))
        elif node.op == "get_attr":
            operator.attrgetter(str(node.target))(owner)


def is_same_graph(graph: fx.Graph, other: fx.Graph) -> bool:
    """Say whether two graphs do the same, node by node and name by name."""
    if len(graph.nodes) != len(other.nodes):
        return False
    pairs = zip(graph.nodes, other.nodes, strict=True)
    return all(_is_same_target(a, b) for a, b in pairs) and str(graph) == str(other)


def _is_same_target(node: fx.Node, other: fx.Node) -> bool:
    if node.name != other.name or node.op != other.op:
        return False
    return node.target == other.target if isinstance(node.target, str) else node.target is other.target
